"""What the storages of a step are."""

from __future__ import annotations

import torch
from torch import nn

from bigdit.memory import ledger
from bigdit.profile.watch import Watch
from bigdit.record.recorder import Recorder


def test_a_step_s_storages_are_reported_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    class Engine:
        def __init__(self) -> None:
            self.model = model
            self.masters = list(model.parameters())
            self.optimizer = torch.optim.AdamW(self.masters, fused=True)

        def buffers(self):
            return ()

        gradients = calls = buffers

    engine = Engine()
    with Recorder() as recorder:
        with recorder.phase("init"):
            watch = Watch(recorder, engine)
        x = torch.ones(4, 8)
        with watch.phase("forward"):
            loss = model(x).sum()
        with watch.phase("backward"):
            loss.backward()
        del loss
        with watch.phase("step"):
            engine.optimizer.step()
        watch.close()
    found = {each.phase: each for each in ledger(recorder.host_timeline(), 1).phases}
    parameters = 4 * sum(p.numel() for p in model.parameters())
    assert found["init"].at_peak["parameter"] == parameters
    # fp32 [4, 8]: relu's output serves relu and the last layer, the sum is the loss
    assert found["forward"].at_peak["saved activation"] == 4 * 8 * 4 + 4
    assert found["step"].at_peak["gradient"] == parameters
    assert found["step"].at_peak["optimizer state"] == 2 * parameters + 4 * 4
    assert {block.label for block in recorder.host_timeline().blocks if block.category == "saved activation"} >= {"1"}
