"""Rounds of chaos: what is disturbed, when, and what must be true afterwards."""
