"""Where pictures and captions come from: folders, CSV and Parquet tables, WebDataset tars, `datasets` folders.

`open_source(data)` opens what `data.images` lists; nothing is extracted or unpickled, and memory stays small
at tens of millions of pictures.
"""

from bigdit.sources.open import check_sources, open_source
from bigdit.sources.protocol import Caption, Item, Sample, Source, Unusable

__all__ = ["Caption", "Item", "Sample", "Source", "Unusable", "check_sources", "open_source"]
