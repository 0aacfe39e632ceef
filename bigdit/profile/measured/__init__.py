"""Two steps on a real GPU, or of all ranks on emulated ones: torch's counters, the allocator's history, seconds."""
