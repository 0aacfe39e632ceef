"""Encode images to latents and captions to texts: VAEs, text encoders, batch sizes. The same for cached and online.

`sources` reads images and captions, `store` holds the results. Only this layer imports transformers.
"""
