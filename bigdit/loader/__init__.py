"""Batches from the feature store: which samples, in which order, read ahead of the step."""
