"""Encodes images to latents and captions to texts, in the same way for cached and for online features.

`sources` reads images and captions, `store` holds the results. Only this layer imports transformers.
"""
