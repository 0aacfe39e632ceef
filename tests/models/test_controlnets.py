"""ControlNets beside frozen transformers: their steps equal those of diffusers' classes, written by hand."""

import copy

import diffusers
import pytest
import torch
import torch._dynamo
from tiny_models import SANA
from tiny_pipelines import FLUX, QWEN_IMAGE, SD3
from torch.nn import functional as F
from whole import full_weights

from bigdit import engines, models, objectives
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.models.packing import pack, positions, unpack
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import ControlNetSpec, ModelSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

CPU = torch.device("cpu")
SHAPE = (4, 8, 8)
HEADS = {"attention_head_dim": 8, "num_attention_heads": 2}


def of_flux(transformer, controlnet, latents, t, batch):
    shared = {
        "hidden_states": pack(latents),
        "timestep": t,
        "encoder_hidden_states": batch.text_embeds,
        "pooled_projections": batch.extras["pooled_text"],
        **positions(latents, batch.text_embeds),
    }
    blocks, singles = controlnet(controlnet_cond=pack(batch.extras["reference"][:, 0]), **shared, return_dict=False)
    residuals = {"controlnet_block_samples": blocks, "controlnet_single_block_samples": singles}
    return unpack(transformer(**shared, **residuals, return_dict=False)[0], *SHAPE[1:])


def of_sd3(transformer, controlnet, latents, t, batch):
    shared = {
        "hidden_states": latents,
        "timestep": t * 1000,
        "encoder_hidden_states": batch.text_embeds,
        "pooled_projections": batch.extras["pooled_text"],
    }
    (blocks,) = controlnet(controlnet_cond=batch.extras["reference"][:, 0], **shared, return_dict=False)
    return transformer(**shared, block_controlnet_hidden_states=blocks, return_dict=False)[0]


def of_qwen_image(transformer, controlnet, latents, t, batch):
    shared = {
        "hidden_states": pack(latents),
        "timestep": t,
        "encoder_hidden_states": batch.text_embeds,
        "encoder_hidden_states_mask": batch.text_mask.bool(),
        "img_shapes": [[(1, 4, 4)]] * len(latents),
        "return_dict": False,
    }
    blocks = controlnet(controlnet_cond=pack(batch.extras["reference"][:, 0]), **shared)
    return unpack(transformer(**shared, controlnet_block_samples=blocks)[0], *SHAPE[1:])


def of_sana(transformer, controlnet, latents, t, batch):
    shared = {
        "hidden_states": latents,
        "timestep": t * 1000,
        "encoder_hidden_states": batch.text_embeds,
        "encoder_attention_mask": batch.text_mask,
        "return_dict": False,
    }
    (blocks,) = controlnet(controlnet_cond=batch.extras["reference"][:, 0], **shared)
    return transformer(**shared, controlnet_block_samples=blocks)[0]


def qwen_image_from(transformer):
    """With the text's norm, which diffusers leaves out."""
    made = diffusers.QwenImageControlNetModel.from_transformer(
        transformer, num_layers=1, attention_head_dim=16, num_attention_heads=2
    )
    made.txt_norm.load_state_dict(transformer.txt_norm.state_dict())
    return made


def sana_from(transformer):
    """As diffusers' train_controlnet_sana.py begins one."""
    made = diffusers.SanaControlNetModel(**SANA.kwargs | {"num_layers": 1})
    for name in ("patch_embed", "time_embed", "caption_projection", "caption_norm", "transformer_blocks"):
        getattr(made, name).load_state_dict(getattr(transformer, name).state_dict(), strict=False)
    return made


# By class: the model, its ControlNet, how diffusers begins one, and a prediction by hand.
CASES = {
    "FluxTransformer2DModel": (
        FLUX | {"num_layers": 2, "num_single_layers": 2},
        ControlNetSpec(layers=1, single_layers=1),
        lambda each: diffusers.FluxControlNetModel.from_transformer(each, num_layers=1, num_single_layers=1, **HEADS),
        of_flux,
    ),
    "SD3Transformer2DModel": (
        SD3 | {"num_layers": 4},  # the last takes nothing of a ControlNet
        ControlNetSpec(layers=2),
        lambda each: diffusers.SD3ControlNetModel.from_transformer(
            copy.deepcopy(each), num_layers=2, num_extra_conditioning_channels=0
        ),
        of_sd3,
    ),
    "QwenImageTransformer2DModel": (
        QWEN_IMAGE | {"num_layers": 2},
        ControlNetSpec(layers=1),
        qwen_image_from,
        of_qwen_image,
    ),
    "SanaTransformer2DModel": (SANA.kwargs, ControlNetSpec(layers=1), sana_from, of_sana),
}


def a_batch(kwargs):
    """Two random samples with an image each."""
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(2, *shape, generator=generator)  # noqa: E731
    width = kwargs.get("joint_attention_dim") or kwargs["caption_channels"]
    pooled = kwargs.get("pooled_projection_dim")
    extras = {"reference": drawn(1, *SHAPE)} | ({} if pooled is None else {"pooled_text": drawn(pooled)})
    return Batch(drawn(*SHAPE), drawn(6, width), torch.ones(2, 6), (1, 2), extras)


COMPILED = ("FluxTransformer2DModel", "SanaTransformer2DModel")
"""tests/engines/test_controlnets.py compiles SD3's blocks."""


@pytest.mark.parametrize(
    ("class_name", "blocks", "compiled"),
    [*((name, blocks, False) for name in CASES for blocks in (0, "all")), *((name, "all", True) for name in COMPILED)],
)
def test_steps_are_those_of_diffusers_controlnet_written_by_hand(class_name, blocks, compiled):
    """Weight decay shows weights that the loss does not reach: they have no gradient, also in compiled blocks."""
    torch._dynamo.reset()
    kwargs, asked, begin, by_hand = CASES[class_name]
    spec, family = ModelSpec(name="tiny", class_name=class_name, kwargs=kwargs), models.family(class_name)
    transformer = models.build(spec, device=CPU, dtype=torch.float32, seed=0)
    for name, parameter in transformer.named_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    theirs = begin(transformer)
    optimizer = OptimizerSpec(lr=1e-2, weight_decay=0.1, eps=1e-2)  # otherwise a step is the sign of a gradient
    more = {"checkpointed_blocks": blocks, "compile_blocks": compiled}
    strategy = Strategy(precision="fp32", optimizer=optimizer, controlnet=asked, gradient_clipping=None, **more)
    model = models.equip(copy.deepcopy(transformer), family, strategy, backend="aot_eager")
    engine = engines.create(strategy, model, family, device=CPU)
    batch, seen = a_batch(kwargs), []

    def noted(latents, t):
        seen.append((latents, t))
        return torch.zeros_like(latents)

    objective = FlowMatchingSpec()
    objectives.loss(objective, noted, batch.latents, batch.seeds, torch.float32, 16)
    ((noisy, t),) = seen
    velocity = objectives.draw_noise(batch.latents, batch.seeds) - batch.latents
    transformer.requires_grad_(False)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0.1)
    for _ in range(3):  # the projections are zeros in the first
        loss = F.mse_loss(by_hand(transformer, theirs, noisy, t, batch), velocity)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        found = train_step(engine, family, objective, [batch], lr=1e-2).loss
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
    trained = {name.removeprefix("controlnet."): each for name, each in full_weights(engine).items()}
    assert trained.keys() == dict(theirs.named_parameters()).keys()
    for name, wanted in theirs.named_parameters():
        torch.testing.assert_close(trained[name], wanted.detach().view(-1), rtol=1e-3, atol=1e-4)
    before = transformer.state_dict()
    frozen = {name: each for name, each in model.state_dict().items() if not name.startswith("controlnet.")}
    assert frozen.keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in frozen.items())


def losses(class_name, base="bf16", **settings):
    """The losses of four steps, and the model."""
    kwargs, asked, *_ = CASES[class_name]
    spec, family = ModelSpec(name="tiny", class_name=class_name, kwargs=kwargs), models.family(class_name)
    strategy = Strategy(controlnet=asked.model_copy(update={"base": base}), checkpointed_blocks="all", **settings)
    model = models.build(spec, device=CPU, dtype=engines.compute_dtype(strategy), seed=0)
    engine = engines.create(strategy, models.equip(model, family, strategy), family, device=CPU)
    steps = [train_step(engine, family, FlowMatchingSpec(), [a_batch(kwargs)], lr=1e-2).loss for _ in range(4)]
    return [float(each) for each in steps], model


@pytest.mark.parametrize(("base", "off"), [("int8", 1e-3), ("fp8", 4e-3), ("nf4", 5e-2)])
@pytest.mark.parametrize("class_name", CASES)
def test_the_frozen_model_alone_is_quantised(class_name, base, off):
    (plain, _), (found, model) = (losses(class_name, each, precision="fp32") for each in ("bf16", base))
    assert found != plain == pytest.approx(found, rel=off)
    assert found[-1] < found[0]
    dtypes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "nf4": torch.uint8}
    kept = {name for name, each in model.named_parameters() if each.dtype == dtypes[base]}
    assert any("transformer_blocks.0." in name for name in kept)
    assert not any(name.startswith("controlnet.") for name in kept)


@pytest.mark.parametrize("class_name", CASES)
def test_frozen_and_trained_blocks_multiply_in_fp8(class_name):
    (plain, _), (found, model) = losses(class_name), losses(class_name, float8="tensorwise")
    assert found != plain == pytest.approx(found, rel=1e-2)
    assert found[-1] < found[0]
    named = [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"]
    assert {name.startswith("controlnet.") for name in named} == {False, True}


def test_what_cannot_start_one_is_refused():
    flux = ModelSpec(name="tiny", class_name="FluxTransformer2DModel", kwargs=FLUX)
    family = models.family(flux.class_name)
    with pytest.raises(UserError, match="has 2 blocks of a kind of which the model has 1; set fewer"):
        models.equip(models.outline(flux), family, Strategy(controlnet=ControlNetSpec(layers=2)))
    sprint = ModelSpec(name="tiny", class_name=SANA.class_name, kwargs=SANA.kwargs | {"guidance_embeds": True})
    with pytest.raises(UserError, match="which has no such time_embed"):
        models.equip(
            models.outline(sprint), models.family(SANA.class_name), Strategy(controlnet=ControlNetSpec(layers=1))
        )
