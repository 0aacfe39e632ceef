"""Images and captions from folders, CSV and Parquet tables, WebDataset tars and `datasets` folders.

`open.open_source(data)` opens the sources of `data.images`. It extracts and unpickles nothing. Memory stays small with
tens of millions of images. `protocol.py` has the interface; it imports no library for reading.
"""
