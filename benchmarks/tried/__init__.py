"""What `benchmarks/recipes.py` finds of a recipe besides its training: extraction on its GPUs, and what it saves."""
