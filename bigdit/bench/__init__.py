"""Memory against micro-batch, and a run's step on the machine at hand, with its memory beside the prediction.

The step, the loader, extraction and optimizers are timed interleaved with what one would write by hand.

Benchmarks of other things, which nobody imports, are scripts in the folder `benchmarks`.
"""
