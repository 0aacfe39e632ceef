"""Pictures to latents and captions to texts: codecs, VAEs, text encoders, batch sizes; alike offline and on line.

Where they come from is `sources`, where they are kept is `store`. Only this layer imports transformers.
"""
