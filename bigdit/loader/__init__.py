"""Batches from the latent and embedding cache, or from images: the order of samples, read ahead of the step.

The order is a pure function of the seed, the step and the stages of the data.
"""
