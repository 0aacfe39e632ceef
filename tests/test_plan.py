"""The plan: what it prints, its arithmetic, and what it says when nothing fits."""

import json

import pytest
from conftest import ROOT, bigdit
from hypothesis import given
from hypothesis import strategies as st

from bigdit.memory import Ledger
from bigdit.memory.ledger import PhasePeak
from bigdit.search.plan import extrapolated_peak, largest_micro_batch_size

GIB = 2**30


@pytest.mark.slow
def test_the_first_plan(golden):
    """What the README shows is what the command prints, at 80 columns and without colour."""
    done = bigdit("plan", "--model", "sana-1600m", "--gpu", "a40")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    golden("plan-sana-1600m-a40.txt", "".join(line.rstrip() + "\n" for line in done.stdout.splitlines()))


def test_the_readme_shows_the_plan():
    plan = (ROOT / "tests/golden/plan-sana-1600m-a40.txt").read_text()
    assert plan.strip() in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_what_does_not_fit_is_an_answer():
    done = bigdit("plan", "--model", "sana-1600m", "--gpu", "rtx-3070", "--checkpointed-blocks", "all", "--json")
    assert done.returncode == 2
    plan = json.loads(done.stdout)
    assert (plan["fits"], plan["largest_micro_batch_size"]) == (False, 0)
    assert plan["headroom_bytes"] == plan["usable_bytes"] - plan["largest_peak_bytes"] < 0
    shown = bigdit("plan", "--model", "sana-1600m", "--gpu", "rtx-3070", "--checkpointed-blocks", "all")
    assert shown.returncode == 2
    assert "does not fit: a micro-batch of 1 takes" in shown.stdout
    assert "less: --optimizer adamw_8bit, or a larger card" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--model", "sana-160m", "--gpu", "a40"],
            "model 'sana-160m' is not in the catalogue; did you mean sana-1600m",
        ),
        (["--model", "sana-1600m", "--gpu", "a4"], "gpu 'a4' is not in the catalogue; did you mean a40"),
        (["--model", "no/config.json", "--gpu", "a40"], "no/config.json does not exist"),
        (
            ["--model", "sana-1600m", "--gpu", "a40", "--precision", "fp8"],
            "--precision: Input should be 'fp32', 'tf32'",
        ),
        (
            ["--model", "sana-600m", "--gpu", "v100-32g"],
            "computes no bf16 (compute capability 7.0), and precision is bf16; fp16",
        ),
        (["--model", "sana-1600m", "--gpu", "a40", "--resolution", "1000"], "takes pixels in multiples of 32"),
    ],
)
def test_errors_are_one_line(arguments, error):
    done = bigdit("plan", *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert error in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


def ledger(**peaks):
    phases = (
        PhasePeak(phase=phase, peak_bytes=peak, end_bytes=0, at_peak={"temporary": peak})
        for phase, peak in peaks.items()
    )
    return Ledger(granularity=1, phases=tuple(phases))


phase_lines = st.dictionaries(
    st.sampled_from(["init", "forward", "backward", "step"]),
    st.tuples(st.integers(0, 80 * GIB), st.integers(0, 4 * GIB)),
    min_size=1,
)


@given(phase_lines, st.integers(1, 96 * GIB))
def test_the_largest_micro_batch_fits_and_the_next_does_not(lines, usable):
    lines["backward"] = (lines.get("backward", (0, 0))[0], lines.get("backward", (0, 0))[1] + 1)
    one = ledger(**{phase: base for phase, (base, _) in lines.items()})
    two = ledger(**{phase: base + each for phase, (base, each) in lines.items()})
    largest = largest_micro_batch_size((one, two), usable)
    if largest:
        assert extrapolated_peak((one, two), largest) <= usable
    assert extrapolated_peak((one, two), largest + 1) > usable


def test_the_rehearsed_sizes_are_on_the_line():
    one, two = ledger(backward=10, step=25), ledger(backward=16, step=25)
    assert [extrapolated_peak((one, two), size) for size in (1, 2, 3, 4)] == [25, 25, 25, 28]
