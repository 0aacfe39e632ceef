"""The oldest torch and the newest that bigdit is tested with run steps on an emulated GPU.

A recorded run ends with an error where its categories do not sum to that torch's own counters.
"""

import json

import pytest
from commands import ROOT, bigdit

from bigdit.profile.notices import TESTED_WITH


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single,lora.base=nf4,checkpointed_blocks=all", "zero3", "fsdp2"])
@pytest.mark.parametrize(("which", "at"), [("oldest", 0), ("newest", 1)])
def test_another_torch_runs_what_is_attempted_and_recorded(strategy, which, at):
    python = ROOT / f".venv-{which}/bin/python"
    asked = ("--model", "sana-600m", "--gpu", "a40", "--strategy", strategy, "--json")
    attempted, recorded = (
        bigdit(*command, *asked, BIGDIT_CUDA_PYTHON=str(python))
        for command in (("bench", "memory", "--micro-batch", "1"), ("profile",))
    )
    assert (attempted.returncode, recorded.returncode) == (0, 0), attempted.stderr + recorded.stderr
    found = json.loads(recorded.stdout)
    assert found["versions"]["torch"].partition("+")[0] == TESTED_WITH["torch"][at]
    (point,) = json.loads(attempted.stdout)["curves"][0]["points"]
    phases = {phase["phase"]: phase["peak_bytes"] for phase in found["ledger"]["phases"]}
    assert point["emulated"]["phases"] == phases
    assert point["emulated"]["reserved_bytes"] == found["peak_reserved_bytes"]
