"""Two steps on a real GPU, in a process of their own (`run.py`): torch's counters by phase, and seconds."""
