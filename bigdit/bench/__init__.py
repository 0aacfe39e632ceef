"""Memory against micro-batch, and a run's step on the machine at hand: its memory beside the prediction, its time
interleaved with that of a loop written by hand.

Benchmarks of other things, which nobody imports, are scripts in the folder `benchmarks`.
"""
