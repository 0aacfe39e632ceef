"""The commands, one file each: a function `run` that only parses and hands over; torch is imported inside it."""
