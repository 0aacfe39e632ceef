"""Prodigy, schedule-free AdamW and Muon under FSDP2 equal one process, and resume to the bit."""

import json

import pytest
from commands import HELPERS, ROOT, run_ranks

# As a share of the distance of three steps. Adam divides by roots of squares, where the last digit of a small gradient
# counts. Muon rounds gradients to bf16, whose neighbours are 2^-8 apart.
APART = {"muon": 2e-3}


@pytest.mark.slow
def test_they_step_as_one_process_and_resume_to_the_bit(tmp_path):
    """On four processes with two copies of the model, and with adapters that have fewer rows than processes."""
    script = ROOT / "tests/engines/fsdp2_optimizers.py"
    done = run_ranks(4, script, tmp_path, PYTHONPATH=HELPERS, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    assert found["muon in backward"][0] == 0
    for name, (apart, same) in found.items():
        assert same, name
        assert apart < APART.get(name.split()[0], 5e-4), name
