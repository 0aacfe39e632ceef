"""Plans: what fits a GPU, how fast it goes, and what to set.

1. `request.py` has a field for each option. `ask.py` makes a `Question` of them, or all errors at once; `of_run.py`
   does so for a run.yaml.
2. `space.py` lists strategies in the order in which they are preferred. `explore.py` runs a few attempts of each.
   `predict.py` estimates other micro-batches and numbers of recomputed or swapped blocks.
3. `candidates.py` orders them. `solve.py` runs the best until one fits; each run corrects the estimates. That one is
   recorded. `explore.py` finds the largest micro-batches.
4. `rows.py` runs the alternatives. `fixes` in `explain.py` looks for what would fit where nothing does.
"""
