"""How much more than predicted torch may reserve on a real card that nothing was measured of."""

from __future__ import annotations

from bigdit.search.plan import Band

UNPROVED = Band(
    share=0.003,
    source="so far were rehearsals below emulated cards, and these below real ones",
)
"""Where no receipt of the card says more. Rehearsals are below emulated cards in 3 of 375 rows, by 0.25 % of what is
reserved at most (benchmarks/referee.md). Emulated cards are below an A100 by 0.02 % at most in seventeen configurations
of cogvideox-factory's own scripts, since they take cuDNN's workspace for patches; 0.9 % before (benchmarks/peers.md,
which tells of an eighteenth, whose blocks addresses decide in torch's default allocator). Of bigdit's own steps, with
expandable segments, a real H100 reserved what the emulated one did to the byte, but for a mixture of experts
(benchmarks/gpu_matrix.md).

cuDNN's other workspaces are not in it: torch takes the next algorithm where one of them is too much for the card.
Source: try_configs in aten/src/ATen/native/cudnn/Conv_v8.cpp, torch 2.13, which catches OutOfMemoryError.
"""

UNPROVED_ROUTED = Band(
    share=0.029,
    source="a real H100 took so much more than an emulated one where experts are chosen by values",
)
"""The same of a mixture of experts: nothing without values knows how many tokens each expert has. HiDream-I1 of two
blocks allocated 2.9 % more on an H100 than on an emulated one, and reserved 1.0 % more (benchmarks/gpu_matrix.md)."""
