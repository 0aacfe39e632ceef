"""The commands, one file each: a function `run` that only parses and hands over; torch is imported inside it.

What a command does is in the layers below, how its answer looks in `report`.
"""
