"""Plans: what fits a GPU, how fast it goes, and what to set.

1. `request.py` has a field for each thing that may be asked. `resolve.py` makes a `ResolvedRequest` of them, or reports
   all errors at once; `of_run.py` does so for a run.yaml.
2. `space.py` lists options, which leave the sizes of a step open, in the order in which they are preferred. `option.py`
   predicts sizes from a few attempts.
3. `planner.py` has all that is known of a request. Each strategy is an `Estimate`: predicted, then run, then recorded.
4. `explore.py` makes the attempts by which options predict, and rejects those without a chance. `solve.py` runs the
   best estimates until one fits; each run corrects the predictions. That one is recorded.
5. `rows.py` runs the alternatives. `explain.py` shows the way from the usual setting, and what would fit where nothing
   does. `answer.py` makes the `Plan`, or has it from the cache.
"""
