"""One file for each wire format that agents speak."""
