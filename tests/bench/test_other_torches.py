"""The oldest torch and the newest that bigdit is tested with: what is recorded is what is attempted, to the byte."""

import pytest
from cards import A40, request
from commands import ROOT

from bigdit.profile.cards import Cards
from bigdit.profile.notices import TESTED_WITH

STRATEGIES = ("single,lora.base=nf4,checkpointed_blocks=all", "zero3,world_size=8", "fsdp2,world_size=8")


@pytest.mark.slow
@pytest.mark.parametrize(("which", "at"), [("oldest", 0), ("newest", 1)])
def test_another_torch_runs_what_is_attempted_and_recorded(which, at, monkeypatch):
    monkeypatch.setenv("BIGDIT_CUDA_PYTHON", str(ROOT / f".venv-{which}/bin/python"))
    with Cards(A40, 1) as cards:
        for strategy in STRATEGIES:
            asked = request(strategy)
            attempted, recorded = cards.attempt(asked), cards.profile(asked)
            assert recorded.versions["torch"].partition("+")[0] == TESTED_WITH["torch"][at]
            assert {name: phase.peak_bytes for name, phase in attempted.phases.items()} == {
                phase.phase: phase.peak_bytes for phase in recorded.ledger.phases
            }
            assert recorded.peak_reserved_bytes == attempted.peak_reserved_bytes
