"""Two steps recorded on an emulated card: categories that sum to what torch counts, as it counts without a recorder."""

import pytest
from cards import A40, request

from bigdit.profile.attempt import Attempts
from bigdit.rehearse.card.client import Profiler

STRATEGIES = (
    "single",
    "single,lora.base=nf4,checkpointed_blocks=all",
    "single,precision=bf16_sr,optimizer.name=adafactor,optimizer_in_backward=true,gradient_clipping=null,"
    "checkpointed_blocks=all,blocks_to_swap=3",
    "single,checkpointed_blocks=1,checkpointing=selective",
    "zero2-offload,world_size=8",
    "zero3,world_size=8,grad_accum_steps=2",
    "fsdp2,world_size=16,dp_replicate=2,ema.device=gpu",
)


@pytest.mark.slow
def test_a_recorded_step_takes_what_a_bare_one_takes():
    with Profiler(A40) as profiler, Attempts(A40) as card:
        for strategy in STRATEGIES:
            asked = request(strategy)
            found, bare = profiler.run(asked), card.run(asked, A40.usable_bytes)
            assert found.ledger.peak_allocated_bytes == bare.peak_allocated_bytes, strategy
            for phase in found.ledger.phases:
                assert sum(phase.at_peak.values()) == phase.peak_bytes, strategy
            workspace = [block for block in found.timeline.blocks if block.category == "workspace"]
            assert workspace, strategy
            assert all(block.label != "before the first operation" for block in workspace), strategy
