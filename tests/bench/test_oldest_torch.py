"""The oldest torch that is supported, on both sides of the referee: what it lacks would be seen here first."""

import json
import os

import pytest
from cards import empty_cache
from commands import HELPERS, ROOT, run_command

from bigdit import catalog
from bigdit.emulator import emulated_environment

PYTHON = ROOT / ".venv-oldest/bin/python"

# A row for each engine, in processes that have this torch alone: bytes that differ, by row and phase.
_JUDGE = """
import importlib.metadata, json
from bigdit.bench.referee import judge
from refereed.rows import PART, SANA
rows = [row for row in PART if row.model == SANA and row.gpu == "a40" and not row.ranks]
found = {
    row.name: found if isinstance(found, str) else {phase.phase: phase.allocated_difference for phase in found.phases}
    for row, found in judge(rows)
}
print(json.dumps({"torch": importlib.metadata.version("torch"), "rows": found}))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("referee")
def test_the_oldest_torch_rehearses_what_it_allocates_on_a_card(tmp_path):
    # NVIDIA's libraries, without which a CUDA build of torch is not imported, are an emulated card's here too.
    emulated = emulated_environment(catalog.resolve_gpu("a40"), 1)
    paths = (emulated["PYTHONPATH"], HELPERS, str(ROOT / "benchmarks"))
    done = run_command(
        *(PYTHON, "-W", "ignore", "-c", _JUDGE),
        **emulated | {"PYTHONPATH": os.pathsep.join(paths), "BIGDIT_CUDA_PYTHON": str(PYTHON)},
        BIGDIT_CACHE=str(empty_cache(tmp_path)),
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["torch"].startswith("2.11.")
    assert len(answer["rows"]) == 5
    for name, phases in answer["rows"].items():
        assert not isinstance(phases, str), f"{name}: {phases}"
        assert set(phases.values()) == {0}, f"{name}: {phases}"
