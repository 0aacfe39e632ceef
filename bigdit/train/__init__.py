"""Training: the step, the loop around it, and how it is started."""
