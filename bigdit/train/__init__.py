"""Training: the step, the loop around it, what is measured and written, and the fallback where memory runs out.

`processes` holds a run's processes and how they end, `monitor` its metrics and validation.
"""
