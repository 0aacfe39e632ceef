"""Asking emulated GPUs: cache, time limits, deaths, full disks, and the message if there is no answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import ROOT
from disks import mounted
from gpus import A40, empty_cache, memory
from tiny_models import SANA, SHAPE

from bigdit.errors import UserError, guard
from bigdit.profile import gpus as module
from bigdit.profile.attempt import AttemptJob, StepRequest, TookTooLong
from bigdit.profile.gpus import EmulatedGpus, worker_environment
from bigdit.profile.pool import WorkerError, WorkerKilled
from bigdit.strategy import Strategy


def asked(micro_batch_size: int = 1, **changes: object) -> StepRequest:
    strategy = Strategy(micro_batch_size=micro_batch_size)
    return StepRequest(model=SANA, batch=SHAPE, strategy=strategy).model_copy(update=changes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of attempts."""
    monkeypatch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path / "cache")))
    return tmp_path / "cache" / "attempts"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let a program of two lines answer instead of the emulated GPU."""

    def made(script: str) -> None:
        file = tmp_path / "worker"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(module, "_worker", lambda *_: ([str(file)], dict(os.environ)))

    return made


def test_an_answer_is_found_again_and_follows_from_sources_versions_and_variables(
    gpus: EmulatedGpus, cache: Path, worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (gpus.attempt(asked(size)) for size in (1, 2))
    assert two.peak_allocated_bytes > one.peak_allocated_bytes
    assert len(list(cache.iterdir())) == 2
    worker("echo 'no such library' >&2; echo >&2; exit 7")
    began = time.perf_counter()
    with EmulatedGpus(A40, 1) as other:
        assert [other.attempt(asked(size)) for size in (2, 1)] == [two, one]
        assert time.perf_counter() - began < 0.5
        with pytest.raises(WorkerError, match="status 7 and no result: no such library\n"):
            other.attempt(asked(3))
        with monkeypatch.context() as patch:
            patch.setattr(module, "digest_of", lambda *names: "of other sources")
            with pytest.raises(WorkerError):
                other.attempt(asked(1))
    for change in (
        lambda patch: patch.setattr(module, "cuda_build", lambda python: "another torch"),
        lambda patch: patch.setattr("bigdit.cache.versions", lambda: {"diffusers": "another"}),
        lambda patch: patch.setenv("DIFFUSERS_ATTN_BACKEND", "native"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            with EmulatedGpus(A40, 1) as newer, pytest.raises(WorkerError):
                newer.attempt(asked(1))


def test_a_damaged_answer_is_not_believed(
    gpus: EmulatedGpus, cache: Path, worker, capsys: pytest.CaptureFixture[str]
) -> None:
    found = gpus.attempt(asked())
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    changes = [b"", whole[:-1], whole[65:], whole + b" ", b'{"micro_batch_size": 1}']
    changes += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 50)]
    worker("exit 7")
    with EmulatedGpus(A40, 1) as other:
        for changed in changes:
            file.write_bytes(changed)
            with pytest.raises(WorkerError):
                other.attempt(asked())
            assert f"{file} is damaged, and the " in capsys.readouterr().err
    assert memory(gpus.attempt(asked())) == memory(found)
    assert "is damaged" in capsys.readouterr().err
    assert memory(gpus.attempt(asked())) == memory(found)
    assert capsys.readouterr().err == ""  # it was written again


def test_a_cache_that_cannot_be_written_is_noticed_and_the_answer_stands(
    gpus: EmulatedGpus, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("a file where the folder should be")
    assert all(gpus.attempt(asked(size)).params > 0 for size in (1, 2))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is not cached" in line]
    assert line.startswith("the attempt is not cached: cannot write")
    assert line.endswith(f"; logged once for {cache}")


def test_a_read_only_cache_answers_and_says_that_nothing_is_kept(
    gpus: EmulatedGpus, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(cache, "size=1m,ro"):
        assert gpus.attempt(asked()).params > 0
    assert f"{cache}/" in (line := capsys.readouterr().err)
    assert line.endswith(f"Read-only file system; logged once for {cache}\n")


def test_an_answer_that_takes_too_long_is_a_line_and_is_not_kept(cache: Path, worker) -> None:
    worker("exec sleep 60")
    printed = r"^two steps of tiny-sana on an emulated a40 took more than 0\.2 s$"
    with EmulatedGpus(A40, 1, timeout_s=0.2) as slow, pytest.raises(TookTooLong, match=printed):
        slow.attempt(asked())
    assert not cache.exists()


def test_a_worker_that_is_killed_gives_its_status_and_no_number(
    cache: Path, worker, capsys: pytest.CaptureFixture[str]
) -> None:
    worker("echo 'about to be killed' >&2\nkill -9 $$")
    with EmulatedGpus(A40, 1) as own:
        with pytest.raises(WorkerKilled, match=f"status {-signal.SIGKILL} and no result:\nabout to be killed"):
            own.attempt(asked())
        assert guard(lambda: print(own.attempt(asked()))) == 1
    assert capsys.readouterr().err == (
        "error: tiny-sana on an emulated GPU ended with status -9 and no result: somebody killed it, or a kernel short "
        "of memory; run it again\n"
    )


ASK = """
from bigdit import catalog
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.attempt import AttemptJob, request_for
from bigdit.strategy import Strategy
gpu, model = catalog.gpu("a40"), catalog.model("dit-xl-2")
with EmulatedGpus(gpu) as emulated:
    sizes = [request_for(model, gpu, Strategy(micro_batch_size=size)) for size in range(1, 60)]
    emulated.attempts([AttemptJob(request=each, capacity_bytes=gpu.usable_bytes) for each in sizes])
"""


def processes(folder: Path) -> list[int]:
    """The processes whose temporary files are there."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"TMPDIR={folder}".encode() in environment:
            found.append(int(process))
    return found


@pytest.mark.slow
def test_one_that_is_killed_or_interrupted_leaves_neither_process_nor_file(tmp_path: Path) -> None:
    """Both at the same time."""
    until, asking = time.monotonic() + 120, {}
    for by in (signal.SIGKILL, signal.SIGINT):
        folder = tmp_path / by.name
        folder.mkdir()
        environment = os.environ | {"TMPDIR": str(folder)}
        asks = subprocess.Popen([sys.executable, "-c", ASK], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
        asking[by] = asks, folder
    for by, (asks, folder) in asking.items():
        while len(processes(folder)) < 3:  # the one that asks, the one that answers, and a fork of it
            assert asks.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        asks.send_signal(by)
    for asks, folder in asking.values():
        asks.wait(60)
        while processes(folder):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert not [file for file in folder.iterdir() if not file.name.startswith("torchinductor")]  # which is torch's


@pytest.mark.slow
def test_a_full_disk_for_temporary_files_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "small", "size=4k") as small:
        (small / "full").write_bytes(bytes(4096))
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        monkeypatch.setenv("TMPDIR", str(small))

        def params() -> int:
            with EmulatedGpus(A40, 1) as own:
                return own.attempt(asked(7)).params

        assert params() > 0
        assert [file.name for file in small.iterdir()] == ["full"]


@pytest.mark.parametrize(
    ("changes", "printed"),
    [
        ({"strategy": Strategy(checkpointed_blocks=9)}, r"checkpointed_blocks is 9, and the model has 2 blocks"),
        ({"model": SANA.model_copy(update={"class_name": "NoTransformer"})}, "no family adapter drives"),
        (
            {"strategy": Strategy(features="online")},
            r"online, and the request for tiny-sana has no encoders",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_line(gpus: EmulatedGpus, changes: dict[str, object], printed: str) -> None:
    for ask in (gpus.attempt, gpus.profile):
        with pytest.raises(UserError, match=printed) as caught:
            ask(asked(**changes))
        assert all("\n" not in problem for problem in caught.value.problems)


def test_a_class_that_refuses_its_arguments_is_one_line(gpus: EmulatedGpus) -> None:
    refused = SANA.model_copy(update={"kwargs": SANA.kwargs | {"num_layers": "many"}})
    with pytest.raises(UserError, match=r"^model\.kwargs\.num_layers is 'many'"):
        gpus.attempt(asked(model=refused))


def test_what_was_refused_is_not_run_again(gpus: EmulatedGpus) -> None:
    """A compiler that fails on a block takes as long each time."""
    refused = AttemptJob(request=asked(strategy=Strategy(checkpointed_blocks=9)))
    found = gpus.attempts([refused] * 2)
    (again,) = gpus.attempts([refused])
    assert isinstance(again, UserError)
    assert all(each is again for each in found)


def test_the_worker_sees_one_gpu_and_no_launched_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(key, "3")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    environment = worker_environment(A40)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"} & environment.keys()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert environment["PATH"] == os.environ["PATH"]


def test_asking_imports_no_torch() -> None:
    code = "import sys, bigdit.profile.gpus, bigdit.profile.measured; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_process_for_models_alone_imports_no_encoders_and_still_can() -> None:
    code = """
import sys
from bigdit import libraries
with libraries.models_alone():
    import bigdit.models, diffusers
diffusers.SanaTransformer2DModel
with libraries.without_transformers():
    import bigdit.models.lora, peft.import_utils
assert not {"transformers", "boto3"} & {*sys.modules}
from transformers.utils.quantization_config import QuantizationConfigMixin
from transformers import T5EncoderModel
assert not peft.import_utils.is_torchao_available()
assert peft.import_utils.is_bnb_available()
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
