"""The parts of gpu_matrix.py: its points, both predictions, the processes that measure, and the page."""
