"""Training: the step, the loop, metrics and validation (`monitor`), the fallback when memory runs out, and a run's
processes and how they end (`processes`)."""
