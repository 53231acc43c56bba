"""The command line. `app` knows the commands, the other modules do what they say."""

from lightningrl.cli.app import main

__all__ = ["main"]
