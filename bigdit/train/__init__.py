"""Training: the step, the loop around it, what is measured and written, and what is done when memory runs out.

A run's processes and their ends are in `processes`, what is seen of it in `monitor`; engines, checkpoints and batches
in their layers.
"""
