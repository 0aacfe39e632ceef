"""Benchmarks of the real step on the machine at hand, held against its rehearsal."""
