"""The command line: `app` declares the commands, and each has a module of its own."""

from lightningrl.cli.app import main

__all__ = ["main"]
