"""Replays: the agent of a recorded run runs again on its recorded answers, or on others from some call on."""
