"""Records, durable and restart-safe. Everything that an agent does ends here, and learning starts from here."""

from lightningrl.store.base import Records, Store, Where, open_records, open_store, wait

__all__ = ["Records", "Store", "Where", "open_records", "open_store", "wait"]
