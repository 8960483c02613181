from outrider.stores.urls import open_store

__all__ = ["open_store"]
