"""Records, durable and restart-safe. Everything that an agent does ends here, and learning starts from here."""

from lightningrl.store.base import Store, open_store

__all__ = ["Store", "open_store"]
