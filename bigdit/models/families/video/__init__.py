"""Families of video models, one file each."""
