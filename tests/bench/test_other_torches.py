"""The oldest and the newest tested torch: a part of all strategies on an emulated GPU with each."""

import pytest
from commands import ROOT
from gpus import SANA, of_blocks, recorded_as_attempted, request

STRATEGIES = (
    "single,checkpointed_blocks=1,checkpointing=selective",
    "single,features=online",
    "single,compile_blocks=true",
    "single,lora.base=nf4,checkpointed_blocks=all",
    "single,lora.base=int8,offload_activations=true,ema.device=cpu",
    "zero2-offload,world_size=8",
    "zero3,world_size=8",
    "fsdp2,world_size=8,optimizer.name=muon,checkpointed_segments.blocks=2",
    "fsdp2-offload,world_size=8,dp_replicate=2",
)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "version"), [("oldest", "2.11."), ("newest", "2.15.")])
def test_another_torch_attempts_and_records_the_same_bytes(which, version, tmp_path, monkeypatch):
    monkeypatch.setenv("BIGDIT_CUDA_PYTHON", str(ROOT / f".venv-{which}/bin/python"))
    model = of_blocks(SANA, 2)
    found = recorded_as_attempted({each: request(each, 1, model) for each in STRATEGIES}, tmp_path / "cache")
    for strategy, profile in found.items():
        assert profile.versions["torch"].startswith(version), strategy
        assert profile.notices == (), strategy
