"""The latent and embedding cache: parts with digests, an index and a schema, read at offsets here or by URL.

`extract` and `encoders` write it. `loader` decides the order in which it is read.
"""

from bigdit.store.store import FeatureStore

__all__ = ["FeatureStore"]
