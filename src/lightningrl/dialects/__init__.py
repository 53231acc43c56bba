"""The wire formats that agents speak, one file each. `base` is the contract."""
