"""bigdit: plan and train large diffusion transformers; the step is rehearsed before it is run."""

__version__ = "0.1.0"
