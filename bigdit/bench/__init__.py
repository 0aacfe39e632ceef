"""The real step on the machine at hand, held against its rehearsal; and the rehearsal, against emulated cards.

The step, the loader, extraction and optimizers are timed by turns with what one would write by hand.

Benchmarks of other things, which nobody imports, are scripts in the folder `benchmarks`.
"""
