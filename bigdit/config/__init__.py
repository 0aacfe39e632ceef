"""A run's YAML: read into strict values (`load.py`), and checked before anything starts (`check.py`).

Checks that need torch, a cache or a checkpoint are where those are opened.
"""
