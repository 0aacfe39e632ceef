"""Rounds of benchmarks/chaos.py, fewer of them: nothing is lost, nothing is silent, all ends equal to the bit."""

import sys

import pytest
from commands import ROOT, run_command

ROUNDS = 30


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_whole_runs_come_through(tmp_path):
    page = tmp_path / "faults.md"
    page.write_text("# Faults\n\n## Extraction\n\nas it was\n")
    chaos = (sys.executable, ROOT / "benchmarks/chaos.py", "--rounds", ROUNDS, "--seed", 0, "--lanes", 2)
    done = run_command(*chaos, "--page", page, timeout=450, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-6000:]
    extraction, runs = page.read_text().split("## Whole runs\n")
    assert extraction == "# Faults\n\n## Extraction\n\nas it was\n\n"
    assert f"{ROUNDS} rounds, 0 of them failed" in runs
    table = runs.partition("| --- |")[2].splitlines()[1:]
    assert sum(int(row.split("|")[2]) for row in table) == ROUNDS
