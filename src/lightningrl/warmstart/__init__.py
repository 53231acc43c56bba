"""How does a model for one's own task begin? Demonstrations → token ids → supervised steps, until the agent succeeds
now and then.
"""
