"""The image families: each steps on an emulated GPU, and gets its conditions."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpus import recorded_as_attempted
from torch import nn
from views import counted_flops, rows_of_linears, written_views

from bigdit import models
from bigdit.catalog import FAMILIES
from bigdit.catalog.families import mask_of
from bigdit.loader.batch import Batch
from bigdit.models.checkpointing import apply_checkpointing
from bigdit.models.float8 import of_tokens
from bigdit.models.packing import diagonal, grid, pack, unpack
from bigdit.objectives import of_latents
from bigdit.profile.attempt import StepRequest
from bigdit.strategy import BatchShape, ModelSpec, SegmentSpec, Strategy

SHAPE = BatchShape(latents=(4, 8, 8), text=(6, 12))
NARROW = {"num_attention_heads": 2, "attention_head_dim": 8}
LATENTS = {"sample_size": 8, "patch_size": 2, "in_channels": 4}
PACKED = NARROW | {"in_channels": 16, "num_layers": 2, "num_single_layers": 1, "joint_attention_dim": 12}

# The published classes with a few narrow blocks.
TINY: dict[str, dict[str, object]] = {
    "DiTTransformer2DModel": NARROW | LATENTS | {"out_channels": 8, "num_layers": 2, "num_embeds_ada_norm": 10},
    "PaperDiT": LATENTS | {"hidden_size": 16, "depth": 2, "num_heads": 2, "num_classes": 10},
    "PixArtTransformer2DModel": LATENTS
    | {"num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 2, "cross_attention_dim": 24}
    | {"caption_channels": 12, "use_additional_conditions": True},
    "SD3Transformer2DModel": NARROW
    | LATENTS
    | {"out_channels": 4, "num_layers": 2, "joint_attention_dim": 12, "caption_projection_dim": 16}
    | {"pooled_projection_dim": 10, "pos_embed_max_size": 8, "dual_attention_layers": [0], "qk_norm": "rms_norm"},
    "FluxTransformer2DModel": PACKED
    | {"pooled_projection_dim": 10, "guidance_embeds": True, "axes_dims_rope": [2, 2, 4]},
    "ChromaTransformer2DModel": PACKED
    | {"axes_dims_rope": [2, 2, 4], "approximator_num_channels": 8}
    | {"approximator_hidden_dim": 16, "approximator_layers": 1},
    "OvisImageTransformer2DModel": PACKED | {"out_channels": 16, "axes_dims_rope": [2, 2, 4]},
    "LongCatImageTransformer2DModel": PACKED | {"axes_dims_rope": [2, 2, 4]},
    "BriaTransformer2DModel": PACKED | {"axes_dims_rope": [0, 4, 4]},
    "CogView3PlusTransformer2DModel": NARROW
    | LATENTS
    | {"out_channels": 4, "num_layers": 2, "text_embed_dim": 12, "time_embed_dim": 8, "condition_dim": 4}
    | {"pos_embed_max_size": 8},
    "Flux2Transformer2DModel": PACKED | {"timestep_guidance_channels": 16, "axes_dims_rope": [2, 2, 2, 2]},
    "AuraFlowTransformer2DModel": NARROW
    | LATENTS
    | {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 12}
    | {"caption_projection_dim": 16, "pos_embed_max_size": 16},
    "HunyuanDiT2DModel": NARROW
    | LATENTS
    | {"hidden_size": 16, "num_layers": 4, "mlp_ratio": 2.0, "cross_attention_dim": 10, "cross_attention_dim_t5": 16}
    | {"pooled_projection_dim": 6, "text_len": 3, "text_len_t5": 6},
    "Lumina2Transformer2DModel": LATENTS
    | {"hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1}
    | {"multiple_of": 8, "axes_dim_rope": [4, 4, 4], "axes_lens": [20, 20, 20], "cap_feat_dim": 12},
    "LuminaNextDiT2DModel": LATENTS
    | {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "num_kv_heads": 1}
    | {"multiple_of": 8, "cross_attention_dim": 12},
    "SanaTransformer2DModel": {"in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 1}
    | NARROW
    | {"num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
    | {"caption_channels": 12, "guidance_embeds": True},
}
MASKED = (
    *("PixArtTransformer2DModel", "ChromaTransformer2DModel", "AuraFlowTransformer2DModel"),
    *("Lumina2Transformer2DModel", "LuminaNextDiT2DModel", "SanaTransformer2DModel"),
)
UNUSED = {"LuminaNextDiT2DModel": {"pad_token"}}  # parameters that diffusers' class has but does not use
MICRO_BATCH_SIZE = 2


def spec_of(class_name: str) -> ModelSpec:
    return ModelSpec(name=f"tiny-{class_name}", class_name=class_name, kwargs=TINY[class_name])


def shape_of(class_name: str) -> BatchShape:
    if FAMILIES[class_name].text_dim is None:
        return BatchShape(latents=SHAPE.latents)
    return SHAPE.model_copy(update={"text": (6, 16)}) if class_name == "HunyuanDiT2DModel" else SHAPE


@pytest.mark.slow
def test_the_recorded_step_of_each_takes_what_a_bare_one_takes(tmp_path: Path) -> None:
    """With one block recomputed, and the others not."""
    strategy = Strategy(micro_batch_size=MICRO_BATCH_SIZE, checkpointed_blocks=1)
    requests = {name: StepRequest(model=spec_of(name), batch=shape_of(name), strategy=strategy) for name in TINY}
    recorded_as_attempted(requests, tmp_path / "cache")


class Fed:
    """A tiny model with random parameters, and a micro-batch of random conditions for it."""

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name
        self.family = models.family(class_name)
        self.model = models.build(spec_of(class_name), device="cpu", dtype=torch.float32, seed=0)
        generator = torch.Generator().manual_seed(1)
        for param in self.model.parameters():  # initial zeros would hide what depends on what
            param.data.normal_(std=0.2, generator=generator)
        draw = functools.partial(torch.randn, generator=generator)
        shape, count = shape_of(class_name), MICRO_BATCH_SIZE
        self.t = torch.tensor([0.3, 0.8])
        self.batch = Batch(
            latents=draw(count, *shape.latents),
            text_embeds=None if shape.text is None else draw(count, *shape.text),
            text_mask=None if shape.text is None else torch.ones(count, shape.text[0]),
            seeds=tuple(range(count)),
            extras={
                name: draw(count, *extra.shape)
                if extra.dtype.is_floating_point and not extra.fill
                else torch.full((count, *extra.shape), extra.fill, dtype=extra.dtype)
                for name, extra in self.family.extras(self.model).items()
            },
        )

    def predict(self, batch: Batch | None = None, t: torch.Tensor | None = None) -> torch.Tensor:
        batch = batch or self.batch
        return self.family.predict(self.model, batch.latents, self.t if t is None else t, batch)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        self.model.zero_grad(set_to_none=True)
        self.predict().square().mean().backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module", params=TINY)
def fed(request: pytest.FixtureRequest) -> Fed:
    return Fed(request.param)


def test_the_prediction_has_the_shape_of_the_latents_and_follows_every_condition(fed: Fed) -> None:
    before = fed.predict()
    assert of_latents(before, 4).shape == fed.batch.latents.shape
    assert before.shape[1] in (4, 8)  # and the variance
    assert torch.allclose(fed.predict(t=fed.t.double()), before, atol=1e-5)  # DDPM's scale
    assert torch.equal(fed.predict(), before)
    assert not torch.allclose(fed.predict(t=fed.t * 0.5), before)
    for changed in _changed(fed.batch):
        assert not torch.allclose(fed.predict(changed), before)


def _changed(batch: Batch) -> list[Batch]:
    """The batch with one of its conditions changed, for each condition."""
    fields = {"latents": batch.latents, "text_embeds": batch.text_embeds, "seeds": batch.seeds}
    changed = []
    if batch.text_embeds is not None:
        changed.append(
            Batch(**fields | {"text_embeds": batch.text_embeds + 1}, text_mask=batch.text_mask, extras=batch.extras)
        )
    for name, extra in batch.extras.items():
        other = extra + 1 if extra.is_floating_point() and not name.endswith("_mask") else 1 - extra
        changed.append(Batch(**fields, text_mask=batch.text_mask, extras={**batch.extras, name: other}))
    return changed


def test_nothing_is_written_into_views_of_units(fed: Fed) -> None:
    """FSDP2 warns of it: it would lose the hook that gathers a unit's weights for the backward pass."""
    assert not written_views(fed.family, fed.model, fed.predict)


def test_fp8_is_of_layers_that_tokens_go_through(fed: Fed) -> None:
    """Layers with a row a sample, such as those of modulation, stay as they are."""
    rows = rows_of_linears(fed.family, fed.model, fed.predict)
    assert {name for name in rows if of_tokens(name)} == {name for name in rows if rows[name] != {MICRO_BATCH_SIZE}}


def test_gradients_reach_every_parameter_that_trains_and_checkpointing_leaves_them(fed: Fed) -> None:
    gradients = fed.gradients()
    without = {name for name, gradient in gradients.items() if gradient is None}
    assert without == UNUSED.get(fed.class_name, set())
    for segments in (None, SegmentSpec(blocks=2)):
        again = Fed(fed.class_name)
        strategy = Strategy(checkpointed_blocks="all", checkpointed_segments=segments)
        apply_checkpointing(again.model, again.family, strategy)
        found = again.gradients()
        assert {name for name, gradient in found.items() if gradient is None} == without
        assert all(torch.equal(found[name], gradients[name]) for name in gradients.keys() - without)


@pytest.mark.parametrize("class_name", MASKED)
def test_padding_says_nothing_where_the_family_masks_it(class_name: str) -> None:
    fed = Fed(class_name)
    mask = torch.ones(MICRO_BATCH_SIZE, 6)
    mask[0, 4:] = 0
    text = fed.batch.text_embeds
    assert text is not None
    other = torch.where(mask.bool().unsqueeze(-1), text, text + 3)
    fed.batch = Batch(fed.batch.latents, text, mask, fed.batch.seeds, fed.batch.extras)
    padded = Batch(fed.batch.latents, other, mask, fed.batch.seeds, fed.batch.extras)
    assert torch.allclose(fed.predict(padded), fed.predict(), atol=1e-5)
    assert all(g is None or bool(g.isfinite().all()) for g in fed.gradients().values())


def test_a_mask_hides_states_of_a_further_text() -> None:
    """In HunyuanDiT, but not from the layer that pools all states of its main text."""
    fed = Fed("HunyuanDiT2DModel")
    own, extras = fed.batch.text_embeds, dict(fed.batch.extras)
    assert own is not None
    mask = torch.tensor([[1.0, 1.0, 0.0]]).repeat(MICRO_BATCH_SIZE, 1)

    def predicted(text: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        own_mask = torch.tensor([[1.0] * 4 + [0.0] * 2]).repeat(MICRO_BATCH_SIZE, 1)
        more = extras | {"clip_text": clip, "clip_text_mask": mask}
        return fed.predict(Batch(fed.batch.latents, text, own_mask, fed.batch.seeds, more))

    clip = extras["clip_text"]
    other = torch.where(mask.bool().unsqueeze(-1), clip, clip + 3)
    assert torch.equal(predicted(own, other), predicted(own, clip))
    assert not torch.allclose(predicted(torch.cat([own[:, :4], own[:, 4:] + 3], dim=1), clip), predicted(own, clip))


@pytest.mark.parametrize("class_name", TINY)
def test_every_new_weight_is_written_to(class_name: str) -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty then returns NaN
    try:
        model = models.build(spec_of(class_name), device="cpu", dtype=torch.bfloat16, seed=0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not [name for name, weights in model.named_parameters() if not weights.isfinite().all()]


@pytest.mark.parametrize("class_name", TINY)
def test_blocks_are_all_lists_of_blocks_in_the_order_of_the_forward_pass(class_name: str) -> None:
    fed = Fed(class_name)
    blocks = fed.family.blocks(fed.model)
    seen: list[nn.Module] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, _: seen.append(module))
    fed.predict()
    assert seen == blocks
    assert len(blocks) == sum(len(child) for child in fed.model.children() if isinstance(child, nn.ModuleList))


@pytest.mark.parametrize("class_name", TINY)
def test_the_catalogue_names_the_same_inputs(class_name: str) -> None:
    fed = Fed(class_name)
    inputs = FAMILIES[class_name]
    streams = (each for name in inputs.streams for each in (name, mask_of(name)))
    assert tuple(fed.family.extras(fed.model)) == (*inputs.extras, *streams)


@pytest.mark.parametrize("class_name", [name for name in TINY if FAMILIES[name].text_dim])
def test_the_catalogue_says_whether_short_captions_are_less_work(class_name: str) -> None:
    fed = Fed(class_name)
    mask = torch.ones(MICRO_BATCH_SIZE, 6)
    mask[:, 3:] = 0
    short = replace(fed.batch, text_mask=mask)
    works = [counted_flops(functools.partial(fed.predict, each)) for each in (fed.batch, short)]
    assert (works[1] < works[0], works[1] == works[0]) == (
        FAMILIES[class_name].by_text,
        not FAMILIES[class_name].by_text,
    )


def test_packing_is_undone_and_positions_run_row_by_row() -> None:
    latents = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    tokens = pack(latents)
    assert tokens.shape == (2, 6, 12)
    assert tokens[0, 1].view(3, 2, 2).equal(latents[0, :, 0:2, 2:4])
    assert unpack(tokens, 4, 6).equal(latents)
    cpu = torch.device("cpu")
    assert grid(1, 2, 2, device=cpu).tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    assert grid(1, 1, 2, start=(1, 7, 8), device=cpu).tolist() == [[1, 7, 8], [1, 7, 9]]
    assert diagonal(2, device=cpu).tolist() == [[0, 0, 0], [0, 1, 1]]


def test_dit_leaves_labels_alone_in_training() -> None:
    """diffusers' embedders drop labels at random in every block, and again in each recomputation."""
    fed = Fed("DiTTransformer2DModel")
    fed.model.train()
    predictions = [fed.predict() for _ in range(4)]
    assert all(torch.equal(prediction, predictions[0]) for prediction in predictions)
    dropped = Batch(**{**fed.batch.__dict__, "extras": {"class_label": torch.full((2,), 10)}})
    assert not torch.allclose(fed.predict(dropped), predictions[0])


@pytest.mark.parametrize("class_name", TINY)
def test_tokens_are_counted_as_the_model_makes_them(class_name: str) -> None:
    fed = Fed(class_name)
    latents = torch.Size((2, 4, 8, 12))
    sides = {"SanaTransformer2DModel": 1}
    assert fed.family.tokens(fed.model, latents) == 8 * 12 // sides.get(class_name, 2) ** 2


@pytest.mark.parametrize(
    ("class_name", "scale"),  # as the family's pipeline scales 1
    [("FluxTransformer2DModel", 1.0), ("Flux2Transformer2DModel", 1.0), ("SanaTransformer2DModel", 0.1)],
)
def test_a_distilled_model_is_trained_at_a_guidance_of_one(class_name: str, scale: float) -> None:
    fed, fed_with = Fed(class_name), []
    hook = fed.model.register_forward_pre_hook(lambda *args: fed_with.append(args[2]["guidance"]), with_kwargs=True)
    fed.predict()
    hook.remove()
    assert [each.tolist() for each in fed_with] == [pytest.approx([scale] * MICRO_BATCH_SIZE)]
