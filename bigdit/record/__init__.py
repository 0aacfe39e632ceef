"""Two steps recorded on a GPU, emulated or real: storages by category and phase, and the work of operators.

The result is a Timeline, which `memory` sums up. `recorder` sees storages and the allocator's history, `costs` counts
operators. `profile/watch.py` marks what the storages are.
"""
