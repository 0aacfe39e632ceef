"""Seconds of a step as intervals: kernels, launches, copies, collectives. Attempts count the work of a step."""
