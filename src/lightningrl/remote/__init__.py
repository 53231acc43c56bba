"""What a worker on another machine and its server say to each other: messages, and digests of their copies of a recipe.

`gateway/workers.py` is the server's side, `runner/remote.py` the worker's.
"""
