"""A run's processes: how they start, meet, lock their output, hear signals, lose each other, restart and end."""
