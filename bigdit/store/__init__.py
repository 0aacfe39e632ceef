"""Features: pictures and captions encoded once, in parallel, into a store that training reads by offset."""

from bigdit.store.store import FeatureStore

__all__ = ["FeatureStore"]
