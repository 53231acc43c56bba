"""What was each call worth? Credit over the calls of a rollout, then advantage over the rollouts of a group. Pure numpy."""
