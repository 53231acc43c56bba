"""Worlds that are small enough to enumerate every rollout, and the policy gradients that estimators give in them."""
