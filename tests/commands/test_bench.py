"""`bigdit bench memory`: memory runs out at the right size, a real GPU is measured, and text, page and JSON agree."""

import json
import os
import re
import subprocess

import pytest
from commands import BIN, ROOT, in_process
from gpus import TIME_LIMIT_S

from bigdit import catalog
from bigdit.bench.memory import MemoryBench
from bigdit.config.strategy_text import parse_strategy
from bigdit.emulator import emulated_environment
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.report.bench import markdown, write_memory

ASKED = ("bench", "memory", "--model", "dit-s-2-paper", "--micro-batch", "64,2,1,128", "--limit", "3GiB")
STRATEGIES = ("--strategy", "single", "--strategy", "single,checkpointed_blocks=all")
NVIDIA_SMI = "0, GPU-1, NVIDIA GeForce RTX 3060, 12288, 4, 11922, [N/A]"
SMALL = ("--gpu", "rtx-3060-12g")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The report of a DiT-S/2 on 3 GiB of an emulated GPU, and the folder with its files."""
    folder = tmp_path_factory.mktemp("bench") / "memory"
    done = in_process(*ASKED, *SMALL, *STRATEGIES, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert f"wrote {folder}: memory.json, memory.md, memory.png, memory.html" in " ".join(done.stderr.split())
    return json.loads((folder / "memory.json").read_text()), folder, done.stdout


@pytest.mark.slow
def test_points_run_from_the_smallest_until_one_runs_out(emulated):
    report = emulated[0]
    assert (report["grade"], report["limited"], report["gpu"]["usable_mib"]) == ("emulated", True, 3072)
    assert report["build"].split()[0] == report["versions"]["torch"] == cuda_build(cuda_python()).split()[0]
    kept, recomputed = report["curves"]
    assert [point["micro_batch_size"] for point in kept["points"]] == [1, 2, 64]
    assert [point["process"] is None for point in kept["points"]] == [False, False, True]
    assert kept["left_out"] == [128]
    last = kept["points"][-1]["emulated"]["ran_out"]
    assert last.startswith("CUDA out of memory. Tried to allocate ")
    assert "total capacity of 3.00 GiB" in last
    assert [point["micro_batch_size"] for point in recomputed["points"]][:3] == [1, 2, 64]


@pytest.mark.slow
def test_the_peak_is_of_a_phase_and_its_categories_sum_to_it(emulated):
    for curve in emulated[0]["curves"]:
        ran = [point for point in curve["points"] if point["process"]]
        for point in ran:
            assert point["ran"] is point["seconds_per_step"] is None
            assert [*point["emulated"]["phases"]] == ["init", "forward", "backward", "step"]
            peak, reserved = max(point["emulated"]["phases"].values()), point["emulated"]["reserved_bytes"]
            assert peak <= reserved < point["process"]["low_bytes"] <= point["process"]["high_bytes"] <= 3 << 30
        assert sum(curve["at_peak"].values()) == max(ran[-1]["emulated"]["phases"].values())


@pytest.mark.slow
def test_every_form_has_the_numbers_its_grade_and_its_command(emulated):
    report, folder, terminal = emulated
    forms = [terminal, (folder / "memory.md").read_text(), (folder / "memory.html").read_text()]
    for point in (point for curve in report["curves"] for point in curve["points"] if point["process"]):
        assert all(f"{point['emulated']['reserved_bytes'] / 2**30:.2f} GiB" in form for form in forms)
    for form in forms:
        assert "emulated: torch's own allocator" in " ".join(form.split()).replace("&#39;", "'")
        assert "out of memory" in form
        assert "not run" in form
    assert all(len(line) <= 80 for line in terminal.splitlines())
    command = "bigdit bench memory --model dit-s-2-paper --gpu rtx-3060-12g --micro-batch 64,2,1,128"
    assert report["command"].startswith(command)
    assert all(command in form for form in forms[1:])
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_every_heading_and_figure_says_that_the_gpu_is_emulated(emulated):
    report, folder, terminal = emulated
    where = "on the emulated NVIDIA GeForce RTX 3060"
    page, text = ((folder / f"memory.{form}").read_text() for form in ("html", "md"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE) + re.findall(r"<h[1-3]>(.+?)</h[1-3]>", page)
    assert len(headings) == 2 * 6 + 2  # only on the page: the process's, and their source
    assert [heading for heading in headings if where not in heading] == ["Where this comes from"]
    figures = [re.sub(r"<[^>]*>", "", figure) for figure in re.findall(r"<text.+?</text>", page, re.DOTALL)]
    titles = [figure.strip() for figure in figures if where in figure]
    assert any("Allocated at the peak, by category, on the emulated" in title for title in titles)
    for curve in report["curves"]:
        largest = max(point["micro_batch_size"] for point in curve["points"] if point["process"])
        assert f"{curve['asked']} {where}: {largest} fits" in " ".join(terminal.split())
    assert any("memory against micro-batch" in title for title in titles)


@pytest.mark.slow
def test_the_text_has_the_peaks_of_each_phase(emulated):
    report, folder, _ = emulated
    text = (folder / "memory.md").read_text()
    assert text.count("| micro-batch | init | forward | backward | step |") == 2
    for curve in report["curves"]:
        for point in curve["points"]:
            if point["process"]:
                peaks = [f"{nbytes / 2**30:.2f} GiB" for nbytes in point["emulated"]["phases"].values()]
                assert f"| {point['micro_batch_size']} | {' | '.join(peaks)} |" in text


@pytest.mark.slow
def test_this_machines_gpu_is_measured_and_one_that_is_emulated_says_so(emulated, tmp_path):
    """The code path of a real GPU, with an emulated one and a fake nvidia-smi: a process for each point, within the
    limit."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho '{NVIDIA_SMI}'\n")
    driver.chmod(0o755)
    environment = os.environ | emulated_environment(catalog.resolve_gpu("rtx-3060-12g"))
    environment["PATH"] = f"{tmp_path}{os.pathsep}{BIN}{os.pathsep}{environment['PATH']}"
    asked = ("bench", "memory", "--model", "dit-s-2-paper", "--gpu", "auto", "--micro-batch", "2,64", "--limit", "3GiB")
    line = [str(cuda_python()), "-W", "ignore", "-c", "from bigdit.cli import main; main()", *asked, "--json"]
    done = subprocess.run(
        line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["grade"], report["gpu"]["name"]) == ("emulated", "rtx-3060-12g")
    (curve,) = report["curves"]
    small, large = curve["points"]
    (before,) = (point for point in emulated[0]["curves"][0]["points"] if point["micro_batch_size"] == 2)
    assert small["ran"] == small["emulated"] == before["emulated"]
    assert large["process"] is None
    assert "ran out of the GPU's memory" in large["ran"]["ran_out"]
    text = markdown(MemoryBench.model_validate(report), "")
    assert "| peak in | emulated % |\n" in text
    assert " | +0.00 / +0.00 |\n" in text


@pytest.mark.slow
def test_every_form_says_what_ran_by_retries_alone_and_none_counts_it(emulated, tmp_path):
    report = emulated[0]
    report = {key: value for key, value in report.items() if key != "command"}
    found = MemoryBench.model_validate(report)
    kept, *others = found.curves
    first, second, *_ = kept.points
    retried = second.model_copy(update={"emulated": second.emulated.model_copy(update={"retries": 3})})
    kept = kept.model_copy(update={"points": (first, retried)})
    found = found.model_copy(update={"curves": (kept, *others)})
    assert kept.largest == first.micro_batch_size
    files = write_memory(found, tmp_path, "bigdit bench memory")
    texts = {file.suffix: file.read_text() for file in files if file.suffix != ".png"}
    line = "† 2 ran, but the allocator had to free its cache and retry (3×)"
    assert all(line in texts[suffix] for suffix in (".md", ".html"))
    assert "single on the emulated NVIDIA GeForce RTX 3060: 1 fits" in texts[".md"]
    assert "| 2† |" in texts[".md"]
    assert '"retries": 3' in texts[".json"]
    assert "+ ran after retries of the allocator" in texts[".html"]


@pytest.mark.slow
def test_headings_say_how_many_processes_share_state_where_nobody_did(emulated):
    found = MemoryBench.model_validate({key: value for key, value in emulated[0].items() if key != "command"})
    headings = []
    for asked in ("single", "zero2", "zero2,world_size=8"):
        own = found.curves[0].model_copy(update={"asked": asked, "strategy": parse_strategy([asked])})
        text = markdown(found.model_copy(update={"curves": (own,)}), "")
        headings.append(text.partition("\n## ")[2].partition("\n")[0])
    where = "on the emulated NVIDIA GeForce RTX 3060: 2 fits"
    assert headings == [f"{named} {where}" for named in ("single", "zero2, 1 process,", "zero2,world_size=8")]


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        (("--micro-batch", "1,two"), "--micro-batch expects sizes such as 1,2,4,8, each from 1 to 65536"),
        (("--micro-batch", "2,1,2"), "--micro-batch 2,1,2 has 2 twice; remove one of them"),
        (("--strategy", "single,micro_batch_size=4"), "--strategy single,micro_batch_size=4 sets micro_batch_size"),
        (("--strategy", "single") * 2, "--strategy single is given twice; leave one of them out"),
        (("--strategy", "zero2", "--strategy", "zero2,world_size=1"), "--strategy zero2,world_size=1 is the same as"),
        (("--steps", "9"), "--steps 9 needs a real GPU (--gpu auto), and this one is emulated; leave it out"),
        (("--micro-batch", "0"), "--micro-batch expects sizes such as 1,2,4,8"),
        (("--limit", "much"), "--limit: a memory size with a unit was expected"),
        (("--limit", "0B"), "--limit 0B is less than 1 MiB; write the bytes of a GPU"),
        (("--limit", "100GiB"), "--limit 100GiB is more than the NVIDIA A40 has"),
        (("--strategy", "zero9"), "--strategy zero9: neither key=value"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_one_line(more, printed):
    done = in_process("bench", "memory", "--model", "dit-s-2-paper", "--gpu", "a40", *more)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {printed}")
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_reported_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/there"):
        done = in_process("bench", "memory", "--model", "dit-s-2-paper", "--gpu", "a40", "--out", folder)
        assert done.returncode == 1
        assert done.stderr == f"error: --out: cannot write {folder}: Not a directory; choose another\n"


def test_what_comes_to_nothing_leaves_no_folder(tmp_path):
    done = in_process("bench", "memory", "--model", "dit-s-3", "--gpu", "a40", "--out", tmp_path / "memory")
    assert done.returncode == 1
    assert done.stderr.startswith("error: model 'dit-s-3' is not in the catalogue")
    assert not (tmp_path / "memory").exists()
