"""Features as they lie on disk: parts under digests, an index and a schema, read by offset, here or from afar.

How they are made is `extract` with `encoders`; in which order they are read is `loader`.
"""

from bigdit.store.store import FeatureStore

__all__ = ["FeatureStore"]
