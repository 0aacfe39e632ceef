"""Faults, and what must be true of a store after each."""
