"""What `benchmarks/recipes.py` finds of a recipe beside its training: extraction on its cards, and what it saves."""
