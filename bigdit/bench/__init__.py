"""The real step on the machine at hand, held against its rehearsal; and the rehearsal, against emulated cards.

Benchmarks of other things, which nobody imports, are scripts in the folder `benchmarks`.
"""
