from outrider.stores.urls import check_url, open_store

__all__ = ["check_url", "open_store"]
