"""Records of what agents do, durable and restart-safe. Learning reads them."""

from lightningrl.store.base import Records, Store, Where, open_records, open_store, wait

__all__ = ["Records", "Store", "Where", "open_records", "open_store", "wait"]
