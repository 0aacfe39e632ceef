"""Compiled and FP8 scripts on emulated GPUs: Inductor and Triton really compile, and their kernels are launched."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from disks import mounted
from gpus import A40, Done, emulate, script

from bigdit.emulator import emulated_environment

SCRIPT = """
import sys, torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

hows, fp8 = sys.argv[1].split(","), sys.argv[2] if len(sys.argv) > 2 else ""
model = Model().to("cuda", torch.bfloat16)
if fp8:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(fp8))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(8, 512, 256, device="cuda", dtype=torch.bfloat16)
for how in hows:
    if how == "blocks":
        for block in model.blocks:
            block.compile(fullgraph=True)
    elif how == "whole":
        model.compile(fullgraph=True)
    elif how != "eager":
        model = torch.compile(model, mode=how)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("peak", torch.cuda.max_memory_allocated(), flush=True)
"""

OWN_KERNEL = """
import torch, triton, triton.language as tl
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

@triton.autotune(configs=[triton.Config({"B": 2**14}, num_warps=1), triton.Config({"B": 256})], key=["n"])
@triton.jit
def double(x, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

x = torch.ones(2**20, device="cuda")
double[lambda meta: (triton.cdiv(2**20, meta["B"]),)](x, torch.empty_like(x), 2**20)
print(double.best_config.kwargs, file=__import__("sys").stderr)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
heads = torch.nn.Parameter(torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([heads])
for _ in range(2):
    torch.compile(flex_attention)(heads, heads, heads, block_mask=mask).sum().backward()
    optimizer.step()
"""


def trained(folder: Path, *arguments: str, gpu: str = "a40", steps: int = 100) -> Done:
    """Inductor compiles in the script's process: others that it would start take seconds to import torch."""
    command = ("python", script(folder, SCRIPT), *arguments)
    asked = ("--gpu", gpu, "--steps", steps, "--json", "--", *command)
    return emulate(*asked, timeout=240, TORCHINDUCTOR_COMPILE_THREADS="1")


def peaks(done: Done) -> list[int]:
    """What torch tells the script after each step."""
    assert done.returncode == 0, done.stderr
    return [int(line.split()[-1]) for line in done.stderr.splitlines() if line.startswith("peak ")]


def test_a_compiled_model_takes_less_memory(tmp_path):
    """Not fewer kernels: Inductor splits the sums of such small blocks. It ends after the requested steps, of which the
    second takes most."""
    done = trained(tmp_path, "eager,whole", steps=6)
    *_, eager, _, whole = peaks(done)
    assert (done.account["steps"], done.account["ended"]) == (6, "steps")
    assert whole < eager == done.account["gpus"][0]["peak_allocated_bytes"]


def test_modes_that_tune_take_the_first_candidate_and_say_so(tmp_path):
    """CUDA graphs, which this mode makes, count their launches."""
    for _ in range(2):  # also with the cache of the first run
        done = trained(tmp_path, "max-autotune")
        assert done.returncode == 0, done.stderr
        assert "an autotuner took its first candidate" in str(done.account["notices"])
        by_step = done.account["work_by_step"]
        assert by_step[-1]["library_calls"] == 6, done.account  # of each Linear: one forward, two backward


def test_blocks_in_fp8_compile_to_fewer_kernels_and_less_memory(tmp_path):
    """And to one graph each."""
    done = trained(tmp_path, "eager,blocks", "rowwise", gpu="h100-sxm")
    assert peaks(done)[7] < peaks(done)[3]
    launches = [step["launches"] for step in done.account["work_by_step"]]
    assert launches[7] < launches[3] / 2


def test_a_gpu_without_fp8_refuses_it(tmp_path):
    done = trained(tmp_path, "eager", "tensorwise")
    assert done.returncode == 1
    assert "only supported on CUDA devices with compute capability" in done.account["error"]["text"]


def test_own_kernels_and_flex_attention_run(tmp_path):
    """The first configuration, with its large block of registers, compiles."""
    done = emulate("--gpu", "a40", "--json", "--", "python", script(tmp_path, OWN_KERNEL), timeout=240)
    assert done.returncode == 0, done.stderr
    assert "{'B': 16384}" in done.stderr
    assert done.account["steps"] == 2


ONE_KERNEL = """
import torch
x = torch.ones(8, device="cuda")
torch.compile(torch.nn.functional.gelu)(x)
"""

PTXAS = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac
exit 255
"""

CC = """#!/bin/sh
case "$*" in *cuda_utils*|*main.c*|*python3*) exit 1;; esac
exec cc "$@"
"""


def program(file: Path, text: str) -> str:
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("what", ["inductor", "full", "ptxas", "cc", "no triton"])
def test_a_compilation_that_fails_outside_the_script_names_the_fix(tmp_path, what):
    (tmp_path / "file").touch()
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow/triton.py").write_text("raise ModuleNotFoundError('no triton', name='triton')")
    broken, said = {
        "inductor": ({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file/in")}, "compile cache cannot be written"),
        "full": (
            dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), str(tmp_path / "full")),
            f"compile cache cannot be written: {tmp_path}/full: No space left on device, 0 bytes free; set",
        ),
        "ptxas": (
            {"TRITON_PTXAS_PATH": program(tmp_path / "ptxas", PTXAS), "TORCHINDUCTOR_COMPILE_THREADS": "2"},
            "assembler ptxas failed",  # in another process
        ),
        "cc": ({"CC": program(tmp_path / "cc", CC)}, "ended with status 1; name another in CC"),
        "no triton": ({"PYTHONPATH": str(tmp_path / "shadow")}, "found no Triton"),
    }[what]
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i"), "TRITON_CACHE_DIR": str(tmp_path / "t")}
    own |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | broken
    with mounted(tmp_path / "full", "size=4k") if what == "full" else nullcontext(tmp_path) as folder:
        (folder / "filled").write_bytes(bytes(4096))
        done = emulate("--gpu", "a40", "--json", "--", "python", script(tmp_path, ONE_KERNEL), **own)
    assert done.returncode == 1
    assert said in str(done.account["notices"])


def test_a_cache_that_takes_no_compiled_code_stops_no_script(tmp_path, monkeypatch):
    """torch's first import makes its compiler's folder, even in scripts that compile nothing."""
    monkeypatch.setenv("BIGDIT_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "emulator").mkdir()
    (tmp_path / "emulator/compiled").write_text("no folder")
    assert not Path(emulated_environment(A40)["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)
