"""Features made of pictures and captions once, by any number of processes and machines, into a store.

Units of work, workers, ranges, SLURM and Ray, the report. What encodes is in `encoders`, what lies on disk in `store`.
"""
