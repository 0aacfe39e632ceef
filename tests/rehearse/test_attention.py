"""Which kernel a CUDA card would choose, by what the fake device is asked to run and to save."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from commands import ROOT

# (name, capability, dtype, head dimension, mask shape or None, requires grad) -> operations of attention seen
CASES = {
    "flash": ((8, 0), "bfloat16", 32, None),
    "flash padded to 8": ((8, 0), "bfloat16", 12, None),
    "efficient for a mask": ((8, 0), "bfloat16", 32, (2, 4, 1, 16)),
    "efficient, bias padded": ((8, 9), "bfloat16", 32, (2, 4, 1, 6)),
    "efficient for fp32": ((8, 0), "float32", 32, None),
    "cudnn on Hopper": ((9, 0), "bfloat16", 32, (2, 4, 1, 16)),
    "cudnn on B200": ((10, 0), "bfloat16", 128, None),
    "flash on sm_120": ((12, 0), "bfloat16", 64, None),
    "math where nothing fits": ((8, 0), "float32", 30, None),
    "no flash backward on sm_86": ((8, 6), "bfloat16", 200, None),
    "efficient on sm_70": ((7, 0), "float16", 32, None),
}

_RUN = """
import json, os, sys
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from bigdit.rehearse.device import fake_device

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

answers = {}
for name, (capability, dtype, dim, mask) in json.load(open(sys.argv[1])).items():
    seen = []
    with fake_device("cuda", tuple(capability)) as device, Seen():
        keys = mask[-1] if mask else 16
        make = lambda length: torch.zeros(2, 4, length, dim, dtype=getattr(torch, dtype), device=device)
        q, k, v = make(10).requires_grad_(), make(keys).requires_grad_(), make(keys).requires_grad_()
        bias = torch.zeros(mask, dtype=q.dtype, device=device) if mask else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out.sum().backward()
        shape = tuple(out.shape)
    answers[name] = [seen, shape, tuple(q.grad.shape)]
json.dump(answers, open(sys.argv[2], "w"))
os._exit(0)
"""

FUSED = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    folder = tmp_path_factory.mktemp("attention")
    (folder / "cases.json").write_text(json.dumps(CASES))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(folder / "cases.json"), str(folder / "answers.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "answers.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_one_that_the_card_would_choose(name: str, seen: dict[str, list[object]]) -> None:
    operations, shape, gradient = seen[name]
    expected = FUSED.get("efficient" if name.startswith("no flash") else name.replace(",", "").split()[0])
    assert {op for op in operations if op in FUSED.values()} == ({expected} if expected else set())
    if expected:
        assert f"{expected}_backward" in operations
    assert shape == gradient == [2, 4, 10, CASES[name][2]]


def test_head_dimensions_and_biases_are_padded_where_the_kernel_needs_it(seen: dict[str, list[object]]) -> None:
    padded = {name for name, (operations, _, _) in seen.items() if "constant_pad_nd" in operations}
    assert padded == {"flash padded to 8", "efficient, bias padded"}
