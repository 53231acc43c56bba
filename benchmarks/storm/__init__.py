"""Parts of `chaos.py`: what breaks, and how to see whether anything came of it."""
