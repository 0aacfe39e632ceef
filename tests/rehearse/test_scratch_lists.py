"""What operators on lists, choices and copies take on CUDA, against the allocator's own trace of torch's CUDA build.

Every expected row was read off torch 2.13.0+cu130, its host code run on an emulated card.
"""

from __future__ import annotations

import pytest
import torch
from answered import answered

from bigdit.rehearse.scratch.launch import Card
from bigdit.rehearse.scratch.lists import cat_table_bytes, split_table_bytes

A40 = Card(torch.device("cpu"), (8, 6), 84)
A100 = Card(torch.device("cpu"), (8, 0), 108)

# processes, elements of bf16 that each gives for a parameter, the table on an A40 and on an A100
SPLITS = [
    (64, [754, 776, 765, 136, 2510], 224, 224),
    (2, [2048245, 16899237, 15674324], 16024, 27168),
    (1, [23499, 47947, 30817, 37341, 11104], 1360, 1360),
]

# processes, shapes of gradients in bf16 that are summed in fp32, the table
CATS = [
    (8, [(64, 22), (277, 14), (281, 19), (228, 6), (198, 21), (295, 16)], 376),
    (64, [(134, 8), (36, 2), (67, 3), (20, 2), (277, 7)], 296),
    (2, [(21, 78183), (52, 91662), (201, 26130)], 92080),
]


@pytest.mark.parametrize(("processes", "elements", "on_a40", "on_a100"), SPLITS)
def test_the_table_that_splits_what_was_gathered(
    processes: int, elements: list[int], on_a40: int, on_a100: int
) -> None:
    split_bytes = [2 * n for n in elements]
    assert split_table_bytes(processes, split_bytes, A40) == on_a40
    assert split_table_bytes(processes, split_bytes, A100) == on_a100


@pytest.mark.parametrize(("processes", "shapes", "table"), CATS)
def test_the_table_that_packs_gradients(processes: int, shapes: list[tuple[int, int]], table: int) -> None:
    assert cat_table_bytes([-(-rows // processes) * columns * 4 for rows, columns in shapes]) == table


HOST = "torch.empty(300, 500)"
HERE = "torch.empty(300, 500, device=card)"
MASK = "torch.empty(1000, 37, dtype=torch.bool, device=card)"
VALUES = "torch.empty(1000, 37, device=card)"
HALVES = "torch.empty(1000, 37, dtype=torch.bfloat16, device=card)"

# operands, what is done with them, what is taken and given back; results stay
CASES = {
    "isinf": ([VALUES], "a.isinf()", [148000, 37000, -148000]),
    "choice of numbers": ([MASK], "torch.where(a, 1, 0)", [8, 8, 296000, -8, -8]),
    "choice of two dtypes": ([MASK, HALVES, VALUES], "torch.where(a, b, c)", [148000, 148000, -148000]),
    "index of 32 bits": (
        [VALUES, "torch.empty(64, dtype=torch.int32, device=card)"],
        "a[b]",
        [512, 9472, -512],
    ),
    "any": (["torch.empty(3154000, device=card)"], "a.any()", [1, 252, 4, -4, -252]),
    "to the card": ([HOST], "a.to(card)", [600000]),
    "to the card, converted there": (
        [HOST],
        "a.to(card, torch.bfloat16, non_blocking=True)",
        [300000, 600000, -600000],
    ),
    "to the card, converted on the host": ([HOST], "a.to(card, torch.bfloat16)", [300000]),
    "to the host": ([HERE], "a.to('cpu')", []),
    "to the host, converted before": (
        [HERE],
        "a.to('cpu', torch.bfloat16, non_blocking=True)",
        [300000, -300000],
    ),
    "to the host in another order, converted before": (
        [HERE],
        "a.t().to('cpu', torch.bfloat16, non_blocking=True)",
        [300000, 300000, -300000, -300000],
    ),
    "a part to the host, packed by its conversion": (
        [HERE],
        "a[:, :100].to('cpu', torch.bfloat16, non_blocking=True)",
        [60000, -60000],
    ),
    "computed on the host": (["torch.empty(1000)"], "torch._foreach_norm([a])", []),
}

_RUN = """
import json, os, sys
import torch
from bigdit.record import Recorder
from bigdit.rehearse.device import fake_device
from bigdit.rehearse.scratch import scratch_of

answers = {}
for name, (operands, operation, _) in json.load(open(sys.argv[1])).items():
    with fake_device("cuda", (8, 6), multiprocessors=84) as card, torch.no_grad():
        recorder = Recorder(card.type, scratch_of(card))
        with recorder:
            with recorder.phase("operands"):
                named = {letter: eval(each) for letter, each in zip("abc", operands)}
            with recorder.phase("operation"):
                kept = eval(operation, {"torch": torch, "card": card} | named)
            timeline = recorder.timeline()
    span = timeline.spans[1]
    taken = [(event, timeline.blocks[abs(event) - 1].nbytes) for event in timeline.events[span.start : span.stop]]
    answers[name] = [nbytes if event > 0 else -nbytes for event, nbytes in taken if nbytes]
json.dump(answers, open(sys.argv[2], "w"))
os._exit(0)
"""


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    return answered(_RUN, CASES, tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("name", CASES)
def test_an_operation_takes_what_cuda_takes_in_its_order(taken: dict[str, list[int]], name: str) -> None:
    assert taken[name] == CASES[name][2]
