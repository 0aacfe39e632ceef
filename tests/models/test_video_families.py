"""Families of video and of large image models: a tiny model of each steps on an emulated GPU."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpus import recorded_as_attempted
from torch import nn
from views import counted_flops, rows_of_linears, written_views

from bigdit import models
from bigdit.catalog import FAMILIES, batch_shape, latent_shape, model
from bigdit.catalog.models import models as catalogue
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.models.float8 import of_tokens
from bigdit.profile.attempt import StepRequest
from bigdit.profile.steps import batch
from bigdit.strategy import BatchShape, ModelSpec, SegmentSpec, Strategy

CPU = torch.device("cpu")
MICRO_BATCH_SIZE = 2

# By name: class_name and kwargs of the smallest model that has every part of the real one, latents and text. HiDream
# sends each token to both experts, so that its real router's shares are equal, too. Its wide latents are padded to the
# largest square.
TINY = json.loads((Path(__file__).parent / "tiny_video.json").read_text())

HALF_READ = ("qwen-image", "hunyuan-video-1.5")
"""Nothing uses the text half of their last block."""


def _spec(name: str) -> ModelSpec:
    return ModelSpec(name=name, class_name=TINY[name]["class_name"], kwargs=TINY[name]["kwargs"])


def _shape(name: str) -> BatchShape:
    return BatchShape(latents=TINY[name]["latents"], text=TINY[name]["text"])


def _strategy(checkpointed: int | str, segments: SegmentSpec | None = None) -> Strategy:
    blocks = {"checkpointed_blocks": checkpointed, "checkpointed_segments": segments}
    return Strategy(micro_batch_size=MICRO_BATCH_SIZE, **blocks)


@pytest.mark.slow
def test_the_recorded_step_of_each_takes_what_a_bare_one_takes(tmp_path: Path) -> None:
    """With one block recomputed, and the others not. One model a class."""
    names = {TINY[name]["class_name"]: name for name in TINY}.values()
    requests = {name: StepRequest(model=_spec(name), batch=_shape(name), strategy=_strategy(1)) for name in names}
    recorded_as_attempted(requests, tmp_path / "cache")


@pytest.mark.parametrize("name", TINY)
def test_predictions_gradients_and_checkpointing(name: str) -> None:
    """The latents' shape, a gradient for each parameter that has one, and the same loss with recomputation."""
    plain = _trained(name, _strategy(0))
    for recomputed in (_trained(name, _strategy("all", segments)) for segments in (None, SegmentSpec(blocks=2))):
        assert torch.equal(plain[0], recomputed[0])
        assert plain[1].keys() == recomputed[1].keys()
        for parameter, grad in plain[1].items():
            assert torch.equal(grad, recomputed[1][parameter]), parameter
    silent = {parameter for parameter, _ in _model(name)[1].named_parameters()} - plain[1].keys()
    # Nothing uses the text half of the last joint block.
    assert all(parameter.startswith("transformer_blocks.1.") for parameter in silent)
    assert len(silent) == (6 if name in HALF_READ else 0)


def test_compiled_blocks_have_no_gradient_either_where_the_loss_does_not_reach() -> None:
    for name in HALF_READ:
        plain, compiled = _trained(name, _strategy(0)), _trained(name, Strategy(compile_blocks=True))
        assert plain[1].keys() == compiled[1].keys()


@pytest.mark.parametrize("name", TINY)
def test_nothing_is_written_into_views_of_units(name: str) -> None:
    """FSDP2 warns of it: it would lose the hook that gathers a unit's weights for the backward pass."""
    family, tiny = _model(name)
    latents, t, conditions = _inputs(name, family, tiny)
    assert not written_views(family, tiny, lambda: family.predict(tiny, latents, t, conditions))


@pytest.mark.parametrize("name", TINY)
def test_fp8_is_of_layers_that_tokens_go_through(name: str) -> None:
    """Layers with a row a sample, such as those of modulation, stay as they are."""
    family, tiny = _model(name, 0)
    latents, t, conditions = _inputs(name, family, tiny)
    rows = rows_of_linears(family, tiny, lambda: family.predict(tiny, latents, t, conditions))
    assert {name for name in rows if of_tokens(name)} == {name for name in rows if rows[name] != {MICRO_BATCH_SIZE}}


@pytest.mark.parametrize("name", TINY)
def test_the_catalogue_says_whether_short_captions_are_less_work(name: str) -> None:
    family, tiny = _model(name)
    latents, t, fed = _inputs(name, family, tiny)
    if name == "z-image":  # their texts are padded to a multiple of 32 tokens
        longer = [torch.cat([each] * 8, dim=1) for each in (fed.text_embeds, fed.text_mask)]
        fed = replace(fed, text_embeds=longer[0], text_mask=longer[1])
    mask = fed.text_mask.clone()
    mask[:, mask.shape[1] // 3 :] = 0
    works = [
        counted_flops(functools.partial(family.predict, tiny, latents, t, each))
        for each in (fed, replace(fed, text_mask=mask))
    ]
    by_text = FAMILIES[family.CLASS_NAME].by_text
    assert (works[1] < works[0], works[1] == works[0]) == (by_text, not by_text)


@pytest.mark.parametrize("name", TINY)
def test_blocks_are_those_of_the_catalogue_in_the_order_of_the_forward_pass(name: str) -> None:
    family, tiny = _model(name)
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
    with pytest.raises(UserError, match=r"^krea2 makes images, and 9 frames were asked for$"):
        batch_shape(model("krea2"), frames=9)
    with pytest.raises(UserError, match=r"is a video model; give the number of frames, such as 33"):
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
    family, tiny = _model("prx")
    latents, t, conditions = _inputs("prx", family, tiny)
    with pytest.raises(UserError, match="the model is conditioned on text, and the batch has none"):
        family.predict(tiny, latents, t, Batch(conditions.latents, None, None, conditions.seeds))


def _model(
    name: str, strategy: Strategy | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[models.Family, nn.Module]:
    family = models.family(TINY[name]["class_name"])
    tiny = models.build(_spec(name), device="cpu", dtype=dtype, seed=0)
    return family, models.equip(tiny, family, strategy or _strategy(0), backend="aot_eager")


def _inputs(name: str, family: models.Family, tiny: nn.Module) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    fed = batch(_shape(name), _strategy(0), family.extras(tiny)).to(CPU, torch.bfloat16)
    noise = torch.randn(fed.latents.shape, generator=torch.Generator().manual_seed(0))
    return noise.bfloat16(), torch.tensor([0.3, 0.7]), fed


def _trained(name: str, strategy: Strategy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients by name."""
    family, tiny = _model(name, strategy)
    latents, t, fed = _inputs(name, family, tiny)
    predicted = family.predict(tiny, latents, t, fed)
    assert predicted.shape == latents.shape
    assert predicted.dtype == latents.dtype
    loss = (predicted - latents).float().square().mean()
    loss.backward()
    return loss.detach(), {path: p.grad for path, p in tiny.named_parameters() if p.grad is not None}
