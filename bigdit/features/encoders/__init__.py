"""Encoders with weights: the only modules of this layer that import diffusers and transformers."""
