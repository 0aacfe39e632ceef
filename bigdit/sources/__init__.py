"""Where pictures and captions come from: folders, CSV and Parquet tables, WebDataset tars, `datasets` folders.

`open.open_source(data)` opens what `data.images` lists; nothing is extracted or unpickled, and memory stays small
at tens of millions of pictures. What a picture is and how it fails is `protocol.py`, which needs no library to read.
"""
