"""The door of rehearsals: answers, cache, limits and what is said when there is no answer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import ROOT
from disks import mounted
from rehearsing import SANA, SHAPE

from bigdit.errors import UserError, guard
from bigdit.rehearse import Rehearsal, WorkerError, StepRequest, client, rehearse
from bigdit.rehearse.pool import Pool
from bigdit.spec import BatchShape, Strategy


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIGDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rehearsals"


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rehearsal, Path]:
    """What a worker answered for three sizes, and the cache that has it since."""
    folder = tmp_path_factory.mktemp("answered")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("BIGDIT_CACHE", str(folder))
        return rehearse(_request(1, 2, 3)), folder


@pytest.fixture
def asked(answered: tuple[Rehearsal, Path], cache: Path) -> Rehearsal:
    """The same, of which the test has a cache of its own."""
    shutil.copytree(answered[1], cache.parent)
    return answered[0]


def _request(*sizes: int, **changes: object) -> StepRequest:
    return StepRequest(model=SANA, batch=SHAPE, strategy=Strategy(), micro_batch_sizes=sizes, **changes)


def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/does/not/exist")


def test_a_second_question_is_answered_from_the_cache_and_a_new_size_by_a_worker(
    asked: Rehearsal, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [size.micro_batch_size for size in asked.sizes] == [1, 2, 3]
    assert asked.size(1).ledger.granularity == 512
    assert asked.size(2).ledger.peak_allocated_bytes > asked.size(1).ledger.peak_allocated_bytes
    assert asked.size(1).versions["torch"] != "missing"
    with pytest.raises(KeyError):
        asked.size(4)
    assert len(list(cache.iterdir())) == 3

    _no_worker(monkeypatch)
    began = time.perf_counter()
    again = rehearse(_request(3, 2, 1))
    assert time.perf_counter() - began < 0.5
    assert again.sizes == asked.sizes[::-1]
    with pytest.raises(FileNotFoundError):
        rehearse(_request(1, 4))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_one_that_is_killed_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    asking = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from bigdit.cli import main; main()",
            "rehearse",
            "--model",
            "dit-xl-2",
            "--gpu",
            "a40",
        ],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while not (workers := _children(asking.pid)):
        assert asking.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    asking.kill()
    asking.wait()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not [file for file in tmp_path.iterdir() if not file.name.startswith("torchinductor")]  # which is torch's


def test_a_full_disk_for_temporary_files_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "small", "size=4k") as small:
        (small / "full").write_bytes(bytes(4096))
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        monkeypatch.setenv("TMPDIR", str(small))
        assert rehearse(_request(1)).size(1).params > 0
        assert [file.name for file in small.iterdir()] == ["full"]


def test_the_strategy_s_own_micro_batch_size_changes_nothing(asked: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_worker(monkeypatch)
    other = _request(1, 2, 3).model_copy(update={"strategy": Strategy(micro_batch_size=7)})
    assert rehearse(other) == asked


@pytest.mark.slow
def test_a_corrupt_cache_is_answered_anew_and_written_again(asked: Rehearsal, cache: Path) -> None:
    files = sorted(cache.iterdir())
    whole = files[1].read_text()
    texts = dict(zip(files, ("", whole[: len(whole) // 2], '{"micro_batch_size": 1}'), strict=True))
    for file, text in texts.items():
        file.write_text(text)
    again = rehearse(_request(1, 2, 3))
    assert [size.ledger for size in again.sizes] == [size.ledger for size in asked.sizes]
    assert sorted(cache.iterdir()) == files
    for file, text in texts.items():
        assert file.read_text() not in ("", text)


def test_a_cache_that_cannot_be_written_is_noticed_and_the_answer_stands(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert all(size.params > 0 for size in rehearse(_request(1, 2)).sizes)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is not kept" in line]
    assert line.startswith("the rehearsal is not kept: cannot write")
    assert line.endswith(f"; said once of {cache}")


def test_a_rehearsal_that_takes_too_long_is_stopped(cache: Path) -> None:
    with pytest.raises(UserError, match=r"rehearsal of tiny-sana took more than 0.2 s and was stopped"):
        rehearse(_request(1), timeout_s=0.2)
    with Pool(1, timeout_s=0.2) as pool:
        (answer,) = pool.rehearse([_request(1)])
        assert (isinstance(answer, UserError), pool.late) == (True, 1)  # a plan with it is not kept
    assert not cache.exists()


def test_a_worker_that_is_killed_gives_its_status_and_no_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'about to be killed' >&2\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(WorkerError, match=f"status {-signal.SIGKILL} and no result:\nabout to be killed"):
        rehearse(_request(1))
    assert guard(lambda: print(rehearse(_request(1)))) == 1
    assert capsys.readouterr().err == (
        "error: the rehearsal of tiny-sana ended with status -9 and no result: somebody killed it, or a kernel short "
        "of memory; run it again\n"
    )


def test_a_worker_that_leaves_without_a_result_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(WorkerError, match="status 0 and no result"):
        rehearse(_request(1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": Strategy(checkpointed_blocks=9)}, r"checkpointed_blocks is 9, and the model has 2 blocks"),
        ({"model": SANA.model_copy(update={"class_name": "NoTransformer"})}, "no family adapter drives"),
        ({"batch": BatchShape(latents=(4, 8, 8))}, "needs the shape of the model's text"),
    ],
)
def test_what_the_user_can_mend_is_one_line(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        rehearse(_request(1).model_copy(update=changes))
    assert all("\n" not in problem for problem in caught.value.problems)


def test_the_worker_sees_no_gpu_and_no_launched_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(key, "3")
    environment = client.worker_environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & environment.keys()
    assert environment["PATH"] == os.environ["PATH"]


def test_asking_imports_no_torch() -> None:
    code = "import sys, bigdit.rehearse; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_on_a_gpu_host_batches_stay_off_the_device_and_blocks_are_counted_in_granules(asked: Rehearsal) -> None:
    """bf16 on the card: 2 B a parameter, 4 B a master, each block rounded up to 512 B."""
    cuda = asked.size(2)
    assert "input" not in cuda.ledger.phase("init").at_peak
    parameters = [block for block in cuda.timeline.blocks if block.category == "parameter"]
    masters = [block for block in cuda.timeline.blocks if block.category == "master weight"]
    assert sum(block.nbytes for block in parameters) == 2 * cuda.params
    assert sum(block.nbytes for block in masters) == 4 * cuda.params
    assert all(phase.peak_bytes % 512 == 0 for phase in cuda.ledger.phases)


def test_a_process_for_models_alone_imports_no_encoders_and_still_can() -> None:
    code = """
import sys
from bigdit import libraries
with libraries.models_alone():
    import bigdit.models, diffusers
diffusers.SanaTransformer2DModel
assert not {"transformers", "boto3"} & {*sys.modules}
from transformers.utils.quantization_config import QuantizationConfigMixin
from transformers import T5EncoderModel
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
