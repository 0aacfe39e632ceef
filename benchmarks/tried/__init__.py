"""What `benchmarks/recipes.py` finds of a recipe beside its training: extraction on its GPUs, and what it saves."""
