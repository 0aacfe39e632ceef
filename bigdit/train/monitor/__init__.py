"""Monitoring: metrics, the validation loss, validation images, and trackers."""
