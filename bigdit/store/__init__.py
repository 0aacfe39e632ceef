"""The latent and embedding cache: parts with digests, an index and a schema, read at offsets here or by URL.

`extract` and `encoders` write it. `loader` decides the order in which it is read. `changes.py` finds what changed in
its sources: by names, sizes and times, and by content if only times differ.
"""

from bigdit.store.store import FeatureStore
