"""Batches from the feature store: which samples, in which order, read ahead of the step.

The order is a pure function of the seed, the step and the data's stages. How bytes lie on disk is `store`.
"""
