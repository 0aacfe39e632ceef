"""Memory and kernels of compiled and FP8 training steps on emulated GPUs: writes compiled.md.

`python benchmarks/compiled.py` runs all modes with the CUDA build of torch. `python benchmarks/compiled.py MODE` trains
in this process, on whatever GPU it has, and prints the peak of the third step. `python benchmarks/compiled.py models`
runs bigdit's own step of whole models instead, as written and with compile_blocks; `float8`, that of two models in bf16
and FP8, with the seconds that a plan predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WIDTH, HEADS, TOKENS, BATCH, BLOCKS, STEPS = 1152, 16, 1024, 8, 4, 3
BF16 = ("bf16", "bf16 compiled", "bf16 recomputed", "bf16 recomputed compiled")
FP8 = (
    *("tensorwise", "tensorwise compiled", "tensorwise recomputed compiled"),
    *("rowwise", "rowwise compiled", "rowwise recomputed compiled"),
)
MODES = {"a40": BF16, "h100-sxm": BF16 + FP8}

MODELS = {
    "sana-1600m-1024": "micro_batch_size=2",
    "pixart-sigma-xl-2-1024": "micro_batch_size=2",
    "sd3.5-medium": "micro_batch_size=2",
    "flux.1-dev": "lora.rank=16",
    "wan2.1-t2v-1.3b": "checkpointed_blocks=all",
}
"""Strategies for one A40."""

FLOAT8_MODELS: dict[str, tuple[int, dict[str, int]]] = {
    "pixart-sigma-xl-2-1024": (8, {}),
    "flux.1-dev": (4, {"num_layers": 4, "num_single_layers": 4}),
}
"""Micro-batches for one H100, and changed arguments."""
FLOAT8_MODES = {
    "bf16": "",
    "bf16, compiled": "compile_blocks=true",
    "tensorwise": "float8=tensorwise",
    "tensorwise, compiled": "float8=tensorwise,compile_blocks=true",
    "rowwise, compiled": "float8=rowwise,compile_blocks=true",
}


def block() -> Any:
    """A DiT block with adaLN."""
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
            self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any, condition: Any) -> Any:
            a, b, c, d, e, f = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
            q, k, v = self.qkv(self.norm(x) * (1 + b) + a).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + c * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + f * self.down(F.gelu(self.up(self.norm(x) * (1 + e) + d), approximate="tanh"))

    return Block()


def train(mode: str) -> dict[str, Any]:
    """Train the blocks in this process. Returns the last step's peak in bytes."""
    import torch
    from torch.utils.checkpoint import checkpoint

    blocks = torch.nn.ModuleList(block() for _ in range(BLOCKS)).to("cuda", torch.bfloat16)
    recipe = mode.split()[0]
    if recipe != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(blocks, config=config, module_filter_fn=lambda _, name: "modulation" not in name)
    if "compiled" in mode:
        for each in blocks:
            each.compile()
    optimizer = torch.optim.AdamW(blocks.parameters())
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    condition = torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        y = x
        for each in blocks:
            y = checkpoint(each, y, condition, use_reentrant=False) if "recomputed" in mode else each(y, condition)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gpu = torch.cuda.get_device_name()
    return {"mode": mode, "gpu": gpu, "torch": torch.__version__, "peak": torch.cuda.max_memory_allocated()}


def emulated(gpu: str, mode: str, python: str) -> dict[str, Any]:
    """Train on an emulated GPU. Returns the peak, and the last step's kernels with calls of cuBLAS."""
    bigdit = str(Path(sys.executable).with_name("bigdit"))
    command = [bigdit, "emulate", "--gpu", gpu, "--json", "--", python, __file__, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stderr.splitlines() if line.startswith('{"mode"')), None)
    if line is None:
        raise SystemExit(f"{gpu}, {mode}: {done.stderr[-2000:]}")
    counts = json.loads(done.stdout)["runs"][0]["accounts"][0]["work_by_step"][-1]
    found: dict[str, Any] = json.loads(line)
    return found | {"kernels": counts["launches"] + counts["library_calls"]}


def whole_models() -> list[str]:
    """Rows with the peak and the kernels of each model's step, as written and compiled."""
    from bigdit import catalog
    from bigdit.config.strategy_text import parse_strategy
    from bigdit.profile.attempt import Attempt, request_for
    from bigdit.profile.gpus import EmulatedGpus
    from bigdit.units import gib

    def ran(gpus: EmulatedGpus, name: str, text: str) -> Attempt:
        request = request_for(catalog.find_model(name), device, parse_strategy([f"single,{text}"]))
        print(f"{name}: {text}", file=sys.stderr, flush=True)
        return gpus.attempt(request)

    def kernels(attempt: Attempt) -> int:
        counts = [attempt.launched[phase].counts for phase in ("forward", "backward", "step")]
        return sum(each.get(name, 0) for each in counts for name in ("launches", "library_calls"))

    device = catalog.resolve_gpu("a40")
    rows = ["| model | strategy | peak | compiled | kernels a step | compiled | less |"]
    rows.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    with EmulatedGpus(device, 1, timeout_s=3600) as gpus:
        for name, text in MODELS.items():
            plain = ran(gpus, name, text)
            row = [name, f"`{text}`", gib(plain.peak_allocated_bytes)]
            made = ran(gpus, name, f"{text},compile_blocks=true")
            both = [kernels(plain), kernels(made)]
            row += [gib(made.peak_allocated_bytes), *(f"{each:,}" for each in both), f"{1 - both[1] / both[0]:.0%}"]
            rows.append(f"| {' | '.join(row)} |")
    return rows


def float8_models() -> list[str]:
    """Rows with the peak and the predicted seconds of each model's step."""
    from bigdit import catalog
    from bigdit.config.strategy_text import parse_strategy
    from bigdit.profile.attempt import request_for
    from bigdit.profile.gpus import EmulatedGpus
    from bigdit.speed.seconds import Cluster, launches_of
    from bigdit.speed.step import step_time
    from bigdit.speed.work import work_of
    from bigdit.units import gib

    device = catalog.resolve_gpu("h100-sxm")
    rows = [f"| model, micro-batch | {' | '.join(FLOAT8_MODES)} |", f"| --- |{' --- |' * len(FLOAT8_MODES)}"]
    with EmulatedGpus(device, 1, timeout_s=3600) as gpus:
        for name, (size, changed) in FLOAT8_MODELS.items():
            cells = [f"{name}, {size}"]
            for text in FLOAT8_MODES.values():
                given = ",".join(filter(None, ["single", f"micro_batch_size={size}", text]))
                request = request_for(catalog.find_model(name), device, strategy := parse_strategy([given]))
                kwargs = request.model.kwargs | changed
                request = request.model_copy(update={"model": request.model.model_copy(update={"kwargs": kwargs})})
                print(f"{name}: {given}", file=sys.stderr, flush=True)
                ran = gpus.attempt(request, counted="step")
                launches = launches_of(ran.launched, 1)
                took = step_time(work_of(ran.work, strategy), strategy, device, Cluster(), launches=launches).seconds
                cells.append(f"{gib(ran.peak_allocated_bytes)}, {took.low:.2f}–{took.high:.2f} s")
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def write(part: str, lines: list[str]) -> None:
    """Put a table between its marks on the page."""
    page = Path(__file__).resolve().with_name("compiled.md")
    text = page.read_text() if page.exists() else f"<!-- {part} -->\n<!-- end -->\n"
    before, mark, rest = text.partition(f"<!-- {part} -->")
    _, end, after = rest.partition("<!-- end -->")
    page.write_text(before + "\n".join([mark, "", *lines, "", end]) + after)
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="*", metavar="MODE", help="such as bf16 compiled; or models, or float8")
    mode = " ".join(parser.parse_args().mode)
    if mode in ("models", "float8"):
        write(mode, whole_models() if mode == "models" else float8_models())
        return
    if mode:
        print(json.dumps(train(mode)), flush=True)
        return
    from bigdit.emulator.interpreter import cuda_python

    python = os.environ.get("COMPILED_PYTHON") or str(cuda_python())
    rows = [emulated(gpu, mode, python) for gpu, modes in MODES.items() for mode in modes]
    lines = [f"torch {rows[0]['torch']}:", "", "| GPU | mode | peak bytes | kernels a step |"]
    lines += ["| --- | --- | ---: | ---: |"]
    lines += [f"| {row['gpu']} | {row['mode']} | {row['peak']:,} | {row['kernels']:,} |" for row in rows]
    write("table", lines)


if __name__ == "__main__":
    main()
