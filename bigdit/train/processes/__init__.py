"""A run's processes: how they start, meet, hold their output, hear signals, lose each other and end."""
