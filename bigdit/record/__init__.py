"""Two steps recorded on a GPU, emulated or real: storages and their ends by category and phase, and what operators do.

They become a Timeline, which `memory` sums up. `recorder` sees storages, `watch` knows what they are, `history` is what
the GPU's allocator did, `costs` counts operators.
"""
