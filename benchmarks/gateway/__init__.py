"""The parts of `benchmarks/gateway.py`: an upstream, clients, the two gateways, and the measurements."""
