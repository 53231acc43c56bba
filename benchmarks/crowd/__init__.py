"""Parts of `clients.py`: a server without a model, and many workers in one process."""
