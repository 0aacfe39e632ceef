"""The oldest torch and the newest that rehearsals are proved with, on both sides of the referee: what the one lacks and
the other has changed would be seen here first."""

import json
import os

import pytest
from cards import empty_cache
from commands import HELPERS, ROOT, run_command

from bigdit import catalog
from bigdit.emulator import emulated_environment
from bigdit.profile.notices import PROVED_WITH

# Bytes that differ, by row and phase, in processes that have this torch alone.
_JUDGE = """
import importlib.metadata, json, sys
from bigdit.bench.referee import judge
from refereed.rows import PART, SANA, Row
biased = Row(SANA, "a100-80g-sxm", "single,lora.base=nf4,checkpointed_blocks=all")  # products of strided rows
rows = [row for row in (*PART, biased) if not row.ranks]
if sys.argv[1] != "all":
    rows = [row for row in rows if row.model == SANA and row.gpu == "a40"]
found = {
    row.name: found if isinstance(found, str) else {phase.phase: phase.allocated_difference for phase in found.phases}
    for row, found in judge(rows)
}
print(json.dumps({"torch": importlib.metadata.version("torch"), "rows": found}))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("referee")
@pytest.mark.parametrize(("which", "asked", "count"), [("oldest", "each engine", 5), ("newest", "all", 14)])
def test_another_torch_rehearses_what_it_allocates_on_a_card(which, asked, count, tmp_path):
    # NVIDIA's libraries, without which a CUDA build of torch is not imported, are an emulated card's here too.
    emulated = emulated_environment(catalog.resolve_gpu("a40"), 1)
    paths = (emulated["PYTHONPATH"], HELPERS, str(ROOT / "benchmarks"))
    python = ROOT / f".venv-{which}/bin/python"
    done = run_command(
        *(python, "-W", "ignore", "-c", _JUDGE, asked),
        **emulated | {"PYTHONPATH": os.pathsep.join(paths), "BIGDIT_CUDA_PYTHON": str(python)},
        BIGDIT_CACHE=str(empty_cache(tmp_path)),
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["torch"] == PROVED_WITH["torch"][which == "newest"]
    assert len(answer["rows"]) == count
    for name, phases in answer["rows"].items():
        assert not isinstance(phases, str), f"{name}: {phases}"
        assert set(phases.values()) == {0}, f"{name}: {phases}"
