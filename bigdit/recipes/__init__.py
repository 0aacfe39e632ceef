"""Runs that are known to fit their cards: a YAML each, and what each took of an emulated one.

`recipe.py` reads them. What a key of a run means is said in `config`, how it is found what fits in `search`.
"""
