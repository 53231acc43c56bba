"""The warm start: demonstrations → token ids → supervised steps, until the agent succeeds now and then."""
