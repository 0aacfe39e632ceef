"""Families whose latents have frames."""
