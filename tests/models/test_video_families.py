"""Families of video and of large image models: each one's real step, and its rehearsal, on a tiny sibling."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from commands import ROOT
from tiny_models import rehearse_all
from torch import nn
from torch.profiler import ProfilerActivity, profile
from traces import assert_same
from views import written_views

from bigdit import engines, models
from bigdit.catalog import batch_shape, latent_shape, model
from bigdit.catalog.models import models as catalogue
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.memory import ledger
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.profile.data import batch
from bigdit.rehearse.drive import STEPS, drive
from bigdit.spec import BatchShape, ModelSpec, Precision, Strategy
from bigdit.train.step import train_step

CPU = torch.device("cpu")
MICRO_BATCH_SIZE = 2

# By name: class_name and kwargs of the smallest sibling that has every part of the real one, latents and text.
# HiDream sends each token to both of its experts, so that the shares of its real router are equal, too; its wide
# latents are padded to the largest square.
TINY = json.loads((Path(__file__).parent / "tiny_video.json").read_text())
CASES: list[tuple[str, int | str]] = [*((name, "all") for name in TINY), ("wan-i2v", 0), ("hidream", 0)]


def _spec(name: str) -> ModelSpec:
    return ModelSpec(name=name, class_name=TINY[name]["class_name"], kwargs=TINY[name]["kwargs"])


def _shape(name: str) -> BatchShape:
    return BatchShape(latents=TINY[name]["latents"], text=TINY[name]["text"])


def _strategy(checkpointed: int | str, precision: Precision = "bf16") -> Strategy:
    return Strategy(micro_batch_size=MICRO_BATCH_SIZE, checkpointed_blocks=checkpointed, precision=precision)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int | str, str], RehearsedSize]:
    folder = tmp_path_factory.mktemp("rehearsals")
    keys = [(*case, "cpu") for case in CASES] + [(name, "all", "cuda") for name in TINY]
    requests = [
        StepRequest(
            model=_spec(name),
            batch=_shape(name),
            strategy=_strategy(checkpointed),
            micro_batch_sizes=(MICRO_BATCH_SIZE,),
            kernels=kernels,
        )
        for name, checkpointed, kernels in keys
    ]
    return dict(zip(keys, rehearse_all(folder, requests), strict=True))


@pytest.mark.slow
@pytest.mark.xdist_group("families_video")  # one worker makes all the rehearsals, once
@pytest.mark.parametrize(("name", "checkpointed"), CASES)
def test_the_rehearsal_is_the_real_step_event_by_event(
    name: str, checkpointed: int | str, rehearsed: dict[tuple[str, int | str, str], RehearsedSize]
) -> None:
    real, params = drive(_spec(name), _shape(name), _strategy(checkpointed), FlowMatchingSpec(), CPU, World())
    answer = rehearsed[name, checkpointed, "cpu"]
    assert answer.params == params
    assert answer.ledger == ledger(real, 1)
    assert_same(answer.timeline, real)


@pytest.mark.slow
@pytest.mark.xdist_group("families_video")
@pytest.mark.parametrize("name", TINY)
def test_the_step_can_be_rehearsed_for_cuda(
    name: str, rehearsed: dict[tuple[str, int | str, str], RehearsedSize]
) -> None:
    """Parameters and their optimizer state are what they are on a CPU; activations are other kernels'."""
    cuda, cpu = rehearsed[name, "all", "cuda"], rehearsed[name, "all", "cpu"]
    assert cuda.params == cpu.params
    for category in ("parameter", "master weight", "optimizer state"):
        there, here = (
            sum(block.nbytes for block in answer.timeline.blocks if block.category == category)
            for answer in (cuda, cpu)
        )
        assert there == here > 0, category


@pytest.mark.parametrize("name", TINY)
def test_predictions_gradients_and_checkpointing(name: str) -> None:
    """The latents' shape, a gradient for each parameter that has one, and the same loss when it is recomputed."""
    plain, recomputed = (_trained(name, checkpointed) for checkpointed in (0, "all"))
    assert torch.equal(plain[0], recomputed[0])
    assert plain[1].keys() == recomputed[1].keys()
    for parameter, grad in plain[1].items():
        assert torch.equal(grad, recomputed[1][parameter]), parameter
    silent = {parameter for parameter, _ in _model(name, 0)[1].named_parameters()} - plain[1].keys()
    # The text's half of a joint block goes nowhere after the last one.
    assert all(parameter.startswith("transformer_blocks.1.") for parameter in silent)
    assert len(silent) == (6 if name in ("qwen-image", "hunyuan-video-1.5") else 0)


@pytest.mark.parametrize("name", TINY)
def test_nothing_is_written_into_views_of_units(name: str) -> None:
    """What FSDP2 warns of: it would lose the hook that gathers a unit's weights for the backward pass."""
    family, tiny = _model(name, 0)
    latents, t, conditions = _inputs(name, family, tiny)
    assert not written_views(family, tiny, lambda: family.predict(tiny, latents, t, conditions))


@pytest.mark.parametrize("name", TINY)
def test_blocks_are_those_of_the_catalogue_in_the_order_of_the_forward_pass(name: str) -> None:
    family, tiny = _model(name, 0)
    blocks, ran, names = family.blocks(tiny), [], {module: path for path, module in tiny.named_modules()}
    for block in blocks:
        block.register_forward_pre_hook(lambda module, args: ran.append(module))
    with torch.no_grad():
        family.predict(tiny, *_inputs(name, family, tiny))
    assert [names[module] for module in ran] == [names[block] for block in blocks]
    lists = list(dict.fromkeys(names[block].split(".")[0] for block in blocks))
    entries = [entry for entry in catalogue() if entry.spec.class_name == family.CLASS_NAME]
    assert entries
    assert all([path for path, _ in entry.block_lists] == lists for entry in entries)


@pytest.mark.parametrize("name", ["hidream-wide", "hunyuan-image"])
def test_masked_indexing_is_recorded_as_autograd_runs_it(name: str) -> None:
    """Gradients of indices are written in place; under a dispatch mode torch itself would not."""
    strategy = _strategy(0, "fp32")  # where CPUs have no bf16, HunyuanImage's 2048 channels take a minute to multiply
    recorded, _ = drive(_spec(name), _shape(name), strategy, FlowMatchingSpec(), CPU, World())
    earlier = ("parameter", "input")
    # The allocator is not asked for empty tensors, such as the padding of text that has none.
    blocks = Counter(block.nbytes for block in recorded.blocks if block.category not in earlier and block.nbytes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels that split a reduction take scratch memory a thread
    gc.collect()
    try:
        family, tiny = _model(name, 0, torch.float32)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine = engines.create(strategy, tiny, family, device=CPU, world=World())
            for _ in range(STEPS):
                micro_batch = batch(_shape(name), strategy, family.extras(tiny))
                train_step(engine, family, FlowMatchingSpec(), [micro_batch], lr=1e-4)
    finally:
        torch.set_num_threads(threads)
    events = profiled.profiler.kineto_results.events()
    allocated = Counter(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)
    assert blocks - allocated == Counter()


def test_a_router_shares_its_tokens_equally() -> None:
    """Of 13 tokens with 2 of 4 experts each, 26 in all: 7, 7, 6 and 6; rows of a mask that is full, or empty."""
    done = subprocess.run([sys.executable, "-c", _SHARES], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"shares": [7, 7, 6, 6], "gradient": [26, 3], "words": [5, 0, 4]}


_SHARES = """
import json, os, torch
from bigdit.rehearse.device import fake_device
with fake_device("cuda", (8, 0)) as device:
    tokens = torch.empty(26, 3, device=device, requires_grad=True)
    chosen = torch.topk(torch.empty(13, 4, device=device), k=2).indices.view(-1)
    rows = [tokens[chosen == expert] for expert in range(4)]
    sum(row.sum() for row in rows).backward()
    mask = torch.ones(5, device=device).bool()
    text = torch.empty(5, 2, device=device)
    table = torch.empty(9, 2, device=device)[torch.arange(4, device=device)]
    shares = [len(row) for row in rows]
    words = [len(text[mask]), len(text[~mask]), len(table)]
    answer = {"shares": shares, "gradient": list(tokens.grad.shape), "words": words}
print(json.dumps(answer), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("name", "latents", "text"),
    [
        ("wan2.1-t2v-1.3b", (16, 21, 60, 104), (512, 4096)),
        ("wan2.2-ti2v-5b", (48, 31, 44, 80), (512, 4096)),
        ("cogvideox-5b", (16, 13, 60, 90), (226, 4096)),
        ("cogvideox1.5-5b", (16, 22, 96, 170), (226, 4096)),
        ("hunyuanvideo-t2v", (16, 33, 90, 160), (256, 4096)),
        ("ltx-video-0.9", (128, 21, 16, 22), (128, 4096)),
        ("ltx-video-0.9.7-13b", (128, 21, 16, 22), (256, 4096)),
        ("sana-video-2b-480p", (16, 21, 60, 104), (300, 2304)),
        ("hunyuanvideo-1.5-480p", (32, 31, 30, 53), (1000, 3584)),
        ("hunyuanvideo-1.5-720p", (32, 31, 45, 80), (1000, 3584)),
        ("kandinsky-5-t2v-lite", (16, 31, 64, 96), (512, 3584)),
        ("kandinsky-5-t2v-pro", (16, 31, 64, 96), (512, 3584)),
        ("mochi-1-preview", (12, 28, 60, 106), (256, 4096)),
        ("krea2", (16, 128, 128), (512, 12 * 2560)),
    ],
)
def test_native_shapes(name: str, latents: tuple[int, ...], text: tuple[int, int]) -> None:
    assert batch_shape(model(name)) == BatchShape(latents=latents, text=text)


def test_video_shapes_that_are_asked_for() -> None:
    wan = model("wan2.1-t2v-1.3b")
    assert batch_shape(wan, (720, 1280), 5).latents == (16, 2, 90, 160)
    assert batch_shape(wan, 256).latents == (16, 21, 32, 32)
    assert latent_shape(wan, 480, 832, 1) == (16, 1, 60, 104)
    with pytest.raises(UserError, match=r"multiples of 4 \(VAE\), and frames is 80; the nearest that fit: 77 or 81$"):
        batch_shape(wan, frames=80)
    with pytest.raises(UserError, match=r"frames is 0; the nearest that fit: 1$"):
        batch_shape(wan, frames=0)
    with pytest.raises(UserError, match=r"^krea2 makes pictures, and 9 frames were asked for$"):
        batch_shape(model("krea2"), frames=9)
    with pytest.raises(UserError, match=r"is a video model, whose latents have frames; give their number, such as 33"):
        latent_shape(wan, 480, 832)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hunyuan-video", {"image_condition_type": "latent_concat"}, "image_condition_type is latent_concat"),
        ("hunyuan-video-1.5", {"use_meanflow": True}, "use_meanflow is true"),
        ("kandinsky-5", {"attention_type": "nabla"}, "attention_type is nabla"),
        ("hunyuan-image", {"use_meanflow": True}, "use_meanflow is true"),
    ],
)
def test_models_that_want_more_than_the_adapter_feeds_are_refused(
    name: str, change: dict[str, object], message: str
) -> None:
    spec = _spec(name)
    spec = spec.model_copy(update={"kwargs": spec.kwargs | change})
    family = models.family(spec.class_name)
    with pytest.raises(UserError, match=message):
        family.extras(models.build(spec, device="cpu", dtype=torch.bfloat16))


def test_a_model_of_text_needs_text() -> None:
    family, tiny = _model("prx", 0)
    latents, t, conditions = _inputs("prx", family, tiny)
    with pytest.raises(UserError, match="the model is conditioned on text, and the batch has none"):
        family.predict(tiny, latents, t, Batch(conditions.latents, None, None, conditions.seeds))


def _model(name: str, checkpointed: int | str, dtype: torch.dtype = torch.bfloat16) -> tuple[models.Family, nn.Module]:
    family = models.family(TINY[name]["class_name"])
    tiny = models.build(_spec(name), device="cpu", dtype=dtype, seed=0)
    return family, models.equip(tiny, family, _strategy(checkpointed))


def _inputs(name: str, family: models.Family, tiny: nn.Module) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    fed = batch(_shape(name), _strategy(0), family.extras(tiny)).to(CPU, torch.bfloat16)
    noise = torch.randn(fed.latents.shape, generator=torch.Generator().manual_seed(0))
    return noise.bfloat16(), torch.tensor([0.3, 0.7]), fed


def _trained(name: str, checkpointed: int | str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients by name."""
    family, tiny = _model(name, checkpointed)
    latents, t, fed = _inputs(name, family, tiny)
    predicted = family.predict(tiny, latents, t, fed)
    assert predicted.shape == latents.shape
    assert predicted.dtype == latents.dtype
    loss = (predicted - latents).float().square().mean()
    loss.backward()
    return loss.detach(), {path: p.grad for path, p in tiny.named_parameters() if p.grad is not None}
