"""How `bigdit emulate` ends: bad input, commands that fail or use no GPU, and signals. It leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import BIN, ROOT, bigdit, in_process
from disks import mounted
from gpus import emulate, script

from bigdit.emulator.interpreter import cuda_python

NO_CUDA = r"torch \S+ in \S+ has no CUDA, .*: run `bigdit setup` "


def test_a_script_that_dies_says_so_itself(tmp_path: Path) -> None:
    """Its status is the command's (test_a_machine_that_fails_ends_the_others), except 2, which means that it does not
    fit."""
    file = script(tmp_path, "import sys, torch\ntorch.ones(1).cuda()\nprint('dying', file=sys.stderr)\nsys.exit(2)\n")
    done = emulate("--gpu", "a40", "--json", "--", "python", file)
    assert done.returncode == 1
    assert "dying" in done.stderr
    assert (done.report["fits"], done.account["fits"]) == (None, None)
    assert done.report["reason"].startswith("the command ended with status 2; until then it needed ")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--gpu", "a41", "--", "python", "-c", "pass"), "a41.*did you mean a40"),
        (("--gpu", "a40", "--", "pithon", "-c", "pass"), "the command 'pithon' was not found"),
        (("--gpu", "a40", "launch/demo.py"), "'launch/demo.py' was not found; it is a script: -- python"),
        (("--gpu", "a40", "--", BIN / "python", "-c", "import torch"), f"^error: {NO_CUDA}"),
        (("--gpu", "a40", "--", "sbatch", "job.sh"), "sbatch returns before its job has run.* write sbatch --wait"),
        (
            ("--gpu", "a40", "--processes", 20, "--", "python", "-c", "pass"),
            "--processes is 20, .* 1 to 16",
        ),
        (("--gpu", "a40", "--out", "/proc/none", "--", "python", "-c", "pass"), "cannot write /proc/none"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[object, ...], problem: str) -> None:
    done = emulate(*arguments)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert re.search(problem, errors[0])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("plan", "--model", "sana-600m"), ("emulate",)])
def test_a_cache_that_cannot_be_used_is_named_at_once(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    command = (*command, "--gpu", "a40", *(["--", "true"] if command == ("emulate",) else []))
    with mounted(tmp_path / "full", "size=200k") as full:
        for cache, reason in ((tmp_path / "file", "Not a directory"), (full, "No space left on device, 0.20 MiB free")):
            done = in_process(*command, BIGDIT_CACHE=cache)
            said = f"error: BIGDIT_CACHE: cannot write {cache}/emulator: {reason}; choose another\n"
            assert (done.returncode, done.stderr) == (1, said)


def test_a_disk_that_is_full_when_libraries_are_built_is_named_once(tmp_path: Path) -> None:
    """It has libraries for another torch. No strategy is blamed."""
    file = script(tmp_path, "import torch\n")
    with mounted(tmp_path / "full", "size=200k") as full:
        (full / "emulator/0a1b").mkdir(parents=True)
        (full / "emulator/0a1b/digests.json").touch()
        for done in (
            emulate("--gpu", "a40", "--", "python", file, BIGDIT_CACHE=full),
            bigdit("plan", "--model", "sana-600m", "--gpu", "a40", BIGDIT_CACHE=full),
        ):
            assert done.returncode == 1
            (line,) = [each for each in done.stderr.splitlines() if not each.startswith("planning the training of ")]
            assert re.fullmatch(
                rf"error: BIGDIT_CACHE: cannot write {full}/emulator/\w+: No space left on device, 0\.\d+ MiB free; "
                "choose another",
                line,
            )


def test_a_build_for_cpus_is_reported_once(tmp_path: Path) -> None:
    """As an error if the command fails by it, as a note if it continues. Neither is an answer."""
    for then, grade in (("", "error: "), ("; true", "note: a process of the command was not emulated: ")):
        done = emulate("--gpu", "a40", "--", "sh", "-c", f"{BIN}/python -c 'import torch'{then}")
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert re.match(grade + NO_CUDA, line), line


def test_a_command_that_uses_no_gpu_is_no_answer() -> None:
    done = emulate("--gpu", "a40", "--", "true")
    assert done.returncode == 1
    assert "no process used a GPU" in done.stdout
    assert "no answer" in done.stdout


def test_a_report_replaces_only_an_earlier_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("emulate", "--gpu", "a40", "--out", out, "--", "true")
    assert [in_process(*asked).stderr.count(f"wrote {out}/report") for _ in range(2)] == [2, 2]
    (out / "cat.png").touch()
    assert in_process(*asked).stderr == (
        f"error: --out: {out} holds cat.png, which no emulation wrote; move it, or name another folder\n"
    )
    (out / "report.json").unlink()
    (out / "report.html").unlink()
    assert in_process(*asked).stderr == (
        f"error: --out: {out} holds cat.png and no emulation; name another folder, or an empty one\n"
    )


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            'import huggingface_hub; huggingface_hub.hf_hub_download("Qwen/Qwen-Image", "model_index.json")',
            "--fake-weights Qwen/Qwen-Image",
        ),
        (
            'import transformers; transformers.AutoTokenizer.from_pretrained("x/y", subfolder="tokenizer")',
            "--fake-weights x/y=LIKE, a folder with its configs or a repository of the catalogue with the same",
        ),
        ('import huggingface_hub; huggingface_hub.hf_hub_download("x/y", "a.png", repo_type="dataset")', None),
        ('open("x/y")', None),
    ],
)
def test_a_repository_that_is_not_there_is_named_with_its_option(tmp_path: Path, call: str, named: str | None) -> None:
    file = script(tmp_path, call)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = emulate("--gpu", "a40", "--json", "--", "python", file, **offline)
    assert done.returncode == 1
    asked = [notice for notice in done.report["notices"] if "--fake-weights" in notice]
    assert [notice.partition("weights: ")[2] for notice in asked] == ([] if named is None else [named])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_is_left_of_a_killed_emulation(tmp_path: Path, number: signal.Signals, status: int) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    file = script(tmp_path, "import torch, time\ntorch.ones(1).cuda()\nprint('ready', flush=True)\ntime.sleep(600)\n")
    python = shutil.which("python", path=str(cuda_python().parent))
    command = [BIN / "bigdit", "emulate", "--gpu", "a40", "--out", tmp_path / "report", "--", python, file]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        folders = list(temporary.glob("bigdit-emulate-*"))
        running.send_signal(number)
        assert running.wait(timeout=60) == status
    assert len(folders) == 1
    assert not (tmp_path / "report").exists()
    deadline = time.monotonic() + 30
    while list(temporary.glob("bigdit-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(temporary.glob("bigdit-*"))
    alive = subprocess.run(["pgrep", "-f", str(file)], capture_output=True, text=True, check=False).stdout
    assert alive == ""
