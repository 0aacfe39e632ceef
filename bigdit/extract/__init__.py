"""Encode images, videos and captions once, by any number of processes and machines, into a store.

1. `extract.py` claims the store (`store/schema.py`) and makes a `Job` of the ranges that are missing. It
   asks `store/changes.py` what changed in the sources. `batch_size.py` asks an emulated GPU how much fits at once.
2. The job runs here, or as a SLURM array or Ray tasks (`tasks.py`). `store/lease.py` picks the next missing range.
3. `extract.py` gives units to worker processes. `worker.py` encodes one unit while the one before it is written.
   Encoders that do not fit a GPU together take turns (`encoders/load.py`).
4. A worker marks its range in `workers/NAME/`, and `store/lease.py` tells whether its process still lives.
5. `store/report.py` counts the finished store; `verify.py` reads every byte.
"""
