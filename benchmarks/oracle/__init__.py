"""Worlds so small that every rollout of theirs can be written down, and what estimators of a policy gradient make of
them.
"""
