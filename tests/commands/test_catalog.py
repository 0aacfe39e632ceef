"""bigdit models, gpus and doctor: what they print at 80 columns without colour, and their JSON."""

import configparser
import io
import json
import os
import subprocess
import sys

import pytest
import typer
from commands import ROOT
from rich.console import Console
from typer.testing import CliRunner

from bigdit import log
from bigdit.catalog.models import models as catalogued
from bigdit.commands import doctor, gpus, models
from bigdit.errors import UserError
from bigdit.report.tables import cell, table


@pytest.fixture
def printed(monkeypatch):
    """The command's output on a plain stdout of 80 columns."""

    def printed(command, **options):
        file = io.StringIO()
        monkeypatch.setattr(log, "out", Console(file=file, width=80))
        command(**options)
        return file.getvalue()

    return printed


def options(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def row(text, name):
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.split()


def test_models_read_well_at_80_columns(printed):
    text = printed(models.run)
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert " ".join(row(text, "sana-1600m-1024")) == "sana-1600m-1024 1.604 B 20 1024 32×32×32 300×2304"
    assert row(text, "flux.1-dev")[3:] == ["19+38", "1024", "16×128×128", "512×4096"]
    assert row(text, "ltx-video-0.9")[-1] == "128×4096"
    assert row(text, "dit-xl-2-paper")[1:] == ["674.8", "M", "28", "256", "4×32×32", "–"]
    assert all(row(text, each.name) for each in catalogued())  # no name is broken
    assert "98 models" in text


def test_gpus_read_well_at_80_columns(printed):
    text = printed(gpus.run)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert " ".join(row(text, "a40")) == "a40 44.35 46068 8.6 149.7 149.7 696 32 56.25"
    assert " ".join(row(text, "b200")) == "b200 178.35 183359 10.0 2250 2250 8000 63 900"
    assert row(text, "gb200")[1].startswith("~")
    assert row(text, "t4")[4] == "–"
    assert row(text, "rtx-pro-6000-server")[1] == "94.96"
    assert "80 GPUs" in text


def test_filter_and_json():
    shown = json.loads(options(models.run, "--filter", "Sana-1600M", "--json").stdout)
    assert [m["spec"]["name"] for m in shown] == [f"sana-1600m-{n}" for n in (512, 1024, 2048, 4096)]
    assert shown[1]["text"]["tokens"] == 300
    (flux,) = json.loads(options(models.run, "--filter", "flux.1-dev", "--json").stdout)
    assert flux["text_pipeline"] == "FluxPipeline"
    (a40,) = json.loads(options(gpus.run, "--filter", "a40", "--json").stdout)[-1:]
    assert a40["sources"]["usable"]
    hopper = json.loads(options(gpus.run, "--filter", "hopper", "--json").stdout)
    assert {"h100-sxm", "h200-sxm"} <= {gpu["name"] for gpu in hopper}
    assert all(gpu["usable_bytes"] == gpu["usable_mib"] * 2**20 for gpu in hopper)
    (h200,) = [gpu for gpu in hopper if gpu["name"] == "h200-sxm"]
    assert (h200["pcie_gbs"], h200["host_gbs"], h200["nvlink_one_way_gbs"]) == (63.02, 63.02, 450)
    assert h200["aliases"] == ["h200"]
    assert h200["mig_profiles"][0] == "1g.18gb"


def test_aliases_are_found_and_shown():
    (sana,) = json.loads(options(models.run, "--filter", "sana-1600m-1024", "--json").stdout)
    assert sana["aliases"] == ["sana-1.6b", "sana-1600m"]
    (schnell,) = json.loads(options(models.run, "--filter", "flux-schnell", "--json").stdout)
    assert (schnell["spec"]["name"], schnell["aliases"]) == ("flux.1-schnell", ["flux-schnell"])
    (medium,) = json.loads(options(models.run, "--filter", "stable-diffusion-3-medium", "--json").stdout)
    assert medium["spec"]["name"] == "sd3-medium"
    assert medium["repositories"][0] == "stabilityai/stable-diffusion-3-medium-diffusers"
    (dev,) = json.loads(options(models.run, "--filter", "labs/flux.1-dev", "--json").stdout)
    assert dev["spec"]["name"] == "flux.1-dev"
    shown = json.loads(options(gpus.run, "--filter", "h100-80g", "--json").stdout)
    assert {"h100-sxm"} <= {gpu["name"] for gpu in shown} <= {"h100-sxm", "h100-pcie"}


def test_gpus_by_memory():
    """The vendor's sizes, by the total that nvidia-smi shows: an A10 with 23028 MiB is a GPU of 24 GB."""

    def names(*arguments):
        return {gpu["name"] for gpu in json.loads(options(gpus.run, *arguments, "--json").stdout)}

    large = names("--min-memory", "24GB")
    assert {"a10", "l4", "rtx-4090", "b200"} <= large
    assert not {"rtx-4080", "rtx-a4500", "t4"} & large
    assert names("--min-memory", "80GB", "--filter", "ampere") == {
        "a100-80g-pcie",
        "a100-80g-sxm",
        "a800-80g-pcie",
        "a800-80g-sxm",
    }


def test_a_filter_that_finds_nothing():
    words = "in its name, alias, repository or class"
    with pytest.raises(UserError, match=rf"no model has 'sanna-1600' {words}; did you mean sana-"):
        models.run(containing="sanna-1600")
    with pytest.raises(UserError, match=rf"no model has 'sdxl' {words}: SDXL and models tuned from it are U-Nets"):
        options(models.run, "--filter", "sdxl")
    with pytest.raises(UserError, match=r"no GPU has 'a4o' in its name, alias or architecture; did you mean a40"):
        gpus.run(containing="a4o")
    with pytest.raises(
        UserError, match=r"^no GPU has 931.32 GiB \(--min-memory 1000GB\); the largest is the b300, 268"
    ):
        gpus.run(min_memory="1000GB")
    with pytest.raises(UserError, match=r"^no GPU with 'turing' in its name has 74.51 GiB \(--min-memory 80GB\); the"):
        gpus.run(containing="turing", min_memory="80GB")
    with pytest.raises(
        UserError,
        match=r"^--min-memory: a memory size with a unit was expected, such as 46068MiB or 24GB, and 'big' was found$",
    ):
        gpus.run(min_memory="big")
    with pytest.raises(
        UserError, match=r"^--min-memory: 24MB is 22.89 MiB, and machines and GPUs have 1 GiB to .*mean 24GiB\?$"
    ):
        gpus.run(min_memory="24MB")


def test_listing_imports_no_torch():
    for name in ("models", "gpus"):
        script = f"import sys; from bigdit.commands import {name}; {name}.run(); assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_doctor_on_this_machine(printed, monkeypatch):
    monkeypatch.setenv("BIGDIT_CACHE", "/absent")
    text = printed(doctor.run)
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("fix:"))
    assert row(text, "cores") == ["cores", str(len(os.sched_getaffinity(0)))]
    assert row(text, "fsdp2")[1] == "yes"
    assert row(text, "collectives")[1].startswith("gloo")
    assert "supported: 2.11 to 2.15" in text
    assert row(text, "libraries")[1:] == ["built", "at", "first", "use,", "in", "/absent/emulator"]


def test_doctor_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    result = options(doctor.run, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert {e["name"]: e["usable"] for e in found["engines"]} == {
        "single": True,
        "ddp": True,
        "fsdp2": True,
        "deepspeed": True,
    }
    assert "gloo" in found["backends"]
    assert found["ram_bytes"] > 2**30
    assert found["compiler"] is None
    assert any(fix.startswith("no C++ compiler was found") for fix in found["fixes"])
    assert found["emulated"]["compiler"] is None
    assert any(fix.startswith("no C compiler: cc is not found, and the emulated GPU") for fix in found["fixes"])


def _environment(folder, version, cuda):
    """An interpreter with a fake torch that reports these values. No other torch is on its path."""
    torch = folder / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text(f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_what_emulated_gpus_need(monkeypatch, tmp_path):
    def found():
        health = doctor.Health(versions={}, cores=1, ram_bytes=1)
        doctor._look_at_emulated_gpus(health)
        return health.emulated, health.fixes

    plain, cuda = _environment(tmp_path / "a", "2.13.0+cpu", None), _environment(tmp_path / "b", "2.13.0+cu130", "13.0")
    monkeypatch.setattr(sys, "executable", str(plain))
    monkeypatch.setenv("BIGDIT_CUDA_PYTHON", str(cuda))
    monkeypatch.setenv("BIGDIT_CACHE", str(tmp_path / "cache"))
    gpu, fixes = found()
    assert (gpu.torch, gpu.python) == ("2.13.0+cu130 CUDA 13.0", str(cuda))
    assert (gpu.cache, gpu.builds, fixes) == (str(tmp_path / "cache/emulator"), 0, [])
    (tmp_path / "cache/emulator" / "0a1b").mkdir(parents=True)
    (tmp_path / "cache/emulator" / "0a1b/digests.json").touch()
    monkeypatch.setattr(sys, "executable", str(cuda))
    gpu, _ = found()
    assert (gpu.python, gpu.builds) == (str(cuda), 1)
    monkeypatch.setattr(sys, "executable", str(plain))
    monkeypatch.setenv("BIGDIT_CUDA_PYTHON", str(plain))
    gpu, (fix,) = found()
    assert gpu.torch is None
    assert fix.startswith(f"BIGDIT_CUDA_PYTHON: {plain} has torch 2.13.0+cpu, not its build for CUDA 13; name another")
    monkeypatch.setenv("BIGDIT_CUDA_PYTHON", str(tmp_path / "none"))
    monkeypatch.setenv("BIGDIT_CACHE", str(plain))  # a file
    _, fixes = found()
    assert fixes[0] == f"BIGDIT_CACHE: cannot write {plain}/emulator: Not a directory; choose another"
    assert fixes[1].startswith(f"BIGDIT_CUDA_PYTHON: {tmp_path / 'none'} cannot be run")


def test_doctor_where_torch_is_broken(monkeypatch, tmp_path, capsys):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: [wrong] ELF class')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError) as error:
        doctor.run(as_json=True)
    assert error.value.problems[0] == "no engine is usable on this machine"
    assert any("torch does not import (ImportError: libtorch.so" in problem for problem in error.value.problems)
    found = json.loads(capsys.readouterr().out)
    assert not any(engine["usable"] for engine in found["engines"])


def test_a_gpu_is_found_by_its_drivers_name_and_memory():
    assert doctor._in_catalog("NVIDIA GeForce RTX 3080", 12_500_000_000) == "rtx-3080-12g"
    assert doctor._in_catalog("NVIDIA GH200 120GB", 101_468_602_368) == "gh200-96g"
    assert doctor._in_catalog("NVIDIA A40", 20 * 2**30) is None
    assert doctor._in_catalog("NVIDIA Unheard Of", 20 * 2**30) is None


def test_the_supported_torch_is_that_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (requirement,) = [r for r in setup["options"]["install_requires"].split() if r.startswith("torch>")]
    first, last = doctor.TORCH_FIRST, doctor.TORCH_LAST
    assert requirement == f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    supported = {"2.11.0": True, "2.13.0+cpu": True, "2.15.0+cu132": True}
    supported |= {"2.10.2": False, "2.16.0a0+git1": False, "3.0.0": False}
    assert {version: doctor.torch_supported(version) for version in supported} == supported


def test_cells_and_narrow_tables():
    shown = [cell(value) for value in (None, True, False, 81.25, 1024, (32, 32, 32), "x")]
    assert shown == ["–", "yes", "no", "81.25", "1024", "32×32×32", "x"]
    made = table("T", ("name", "bytes"), numeric=("bytes",))
    made.add_row("a-rather-long-name", "1234567")
    file = io.StringIO()
    Console(file=file, width=20).print(made)
    assert "1234567" in file.getvalue()
    assert all(len(line) <= 20 for line in file.getvalue().splitlines())
