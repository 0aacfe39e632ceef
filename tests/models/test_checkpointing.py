"""Activation checkpointing and offload change memory, and no number."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from stepping import Executed
from tiny_models import SANA as TINY
from tiny_models import SHAPE
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from bigdit import models
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.models.checkpointing import apply_checkpointing
from bigdit.models.equip import offload_activations
from bigdit.strategy import Strategy


def gradients(policy, layers=2, ran=None):
    """Gradients of a loss in fp32 under `policy`, which sets how activations are kept. `ran` gets the blocks'
    numbers."""
    family = models.family(TINY.class_name)
    spec = TINY.model_copy(update={"kwargs": TINY.kwargs | {"num_layers": layers}})
    model = models.build(spec, device="cpu", dtype=torch.float32, seed=0)
    models.equip(model, family, Strategy(precision="fp32", **policy))
    for number, block in enumerate(family.blocks(model) if ran is not None else ()):
        block.attn1.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *SHAPE.latents, generator=generator)
    text = torch.randn(2, *SHAPE.text, generator=generator)
    batch = Batch(latents, text, torch.ones(2, SHAPE.text[0]), (1, 2))
    family.predict(model, latents, torch.tensor([0.1, 0.6]), batch).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def plain():
    return gradients({})


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("blocks", [1, "all"])
def test_what_is_recomputed_is_what_was_there(kind, blocks, plain):
    found = gradients({"checkpointed_blocks": blocks, "checkpointing": kind})
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ({"checkpointed_blocks": 3}, [2, 1, 0]),
        ({"checkpointed_segments": {"blocks": 2}}, [4, 2, 3, 0, 1]),
        ({"checkpointed_segments": {"blocks": 3, "every": 4}}, [4, 0, 1, 2]),
        ({"checkpointed_segments": {"every": 2}}, [4, 2, 0]),
        ({"checkpointed_segments": {"blocks": 2}, "checkpointed_blocks": 3}, [2, 0, 1]),
    ],
    ids=str,
)
def test_a_segment_is_recomputed_at_once_and_each_block_of_it_once(policy, again, kind, five):
    ran = []
    found = gradients({"checkpointing": kind, **policy}, 5, ran)
    assert ran == [*range(5), *again]
    assert all(torch.equal(found[name], five[name]) for name in five)


@pytest.fixture(scope="module")
def five():
    """The gradients of five blocks."""
    return gradients({}, 5)


@pytest.mark.parametrize(("segments", "kept"), [(None, 6), ({"blocks": 2}, 3), ({"blocks": 6}, 1), ({"blocks": 4}, 2)])
def test_of_a_segment_only_what_its_first_block_is_given_is_kept(segments, kept):
    """Images of 2 samples with 64 tokens of width 16. Two more are saved after the last block."""
    shapes = []

    def pack(tensor):
        shapes.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients({"checkpointed_blocks": "all", "checkpointed_segments": segments}, 6)
    assert shapes.count((2, 64, 16)) == kept + 2


@pytest.mark.parametrize(
    "policy",
    [{}, {"checkpointed_blocks": 1}, {"checkpointed_blocks": "all", "checkpointing": "selective"}],
    ids=str,
)
def test_what_comes_back_from_the_host_is_what_went(policy, plain):
    """Up to rounding: the copy of a tensor with gaps has none, so that products sum in another order."""
    found = gradients({"offload_activations": True, **policy})
    largest = max(gradient.abs().max().item() for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * largest)


def test_selective_checkpointing_runs_matrix_products_and_attention_once():
    """A block's second run, in the backward pass, reads their results."""
    counts = {}
    for kind, blocks in (("plain", 0), ("selective", "all"), ("full", "all")):
        with Executed() as executed:
            policy = {"checkpointed_blocks": blocks, "checkpointing": "full" if kind == "plain" else kind}
            gradients(policy)
        counts[kind] = executed.counts
    aten = torch.ops.aten
    kept = (aten.addmm.default, aten.bmm.default, aten.convolution.default)
    for operator in (*kept, aten._scaled_dot_product_flash_attention_for_cpu.default):
        assert counts["plain"][operator] == counts["selective"][operator] < counts["full"][operator]
    for operator in (aten.silu.default, aten.mul.Tensor):
        assert counts["plain"][operator] < counts["selective"][operator] <= counts["full"][operator]


def test_a_selective_block_that_writes_into_what_it_keeps_is_refused():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).relu_().exp()

    model = nn.ModuleList([Writing()])
    family = SimpleNamespace(blocks=lambda model: list(model))
    apply_checkpointing(model, family, Strategy(checkpointed_blocks=1, checkpointing="selective"))
    with pytest.raises(RuntimeError, match=r"a selective block wrote into what aten\.addmm\.default returned"):
        model[0](torch.ones(2, 4)).sum().backward()


def test_more_blocks_than_the_model_has_are_refused():
    with pytest.raises(UserError, match=r"strategy\.checkpointed_blocks is 9, and the model has \d blocks"):
        gradients({"checkpointed_blocks": 9})
    with pytest.raises(
        UserError, match=r"strategy\.checkpointed_segments\.every is 9, and the model has (\d) blocks; set it to \1 "
    ):
        gradients({"checkpointed_blocks": "all", "checkpointed_segments": {"every": 9}})


def test_what_a_checkpointed_block_is_given_by_name_moves_too():
    """Blocks of Flux and SD3 are called so."""

    class Named(nn.Module):
        def forward(self, *, image, scale):
            return (image * scale).sin()

    block, family = Named(), SimpleNamespace(blocks=lambda model: [model])
    apply_checkpointing(block, family, Strategy(checkpointed_blocks=1))
    offload_activations(block, family)
    image = torch.randn(3, 4, requires_grad=True)
    kept = weakref.ref((moved := image * 2).untyped_storage())
    out = block(image=moved, scale=torch.ones(4))
    del moved
    assert kept() is None
    out.sum().backward()
    assert torch.equal(image.grad, 2 * (image * 2).cos())


def test_activations_move_and_weights_stay():
    layer = nn.Linear(4, 8)
    weight, family = layer.weight, SimpleNamespace(blocks=lambda model: [model])
    offload_activations(layer, family)
    x = torch.randn(3, 4, requires_grad=True)
    saved = layer(x).grad_fn
    assert saved._saved_mat2.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert saved._saved_mat1.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(saved._saved_mat1, x)


def test_what_comes_back_has_the_strides_that_it_had():
    layer = nn.Conv2d(4, 4, 3, padding=1)
    offload_activations(layer, SimpleNamespace(blocks=lambda model: [model]))
    x = torch.randn(2, 4, 5, 5, requires_grad=True).to(memory_format=torch.channels_last)
    assert layer(x).grad_fn._saved_input.stride() == x.stride()


def test_an_expanded_mask_comes_back_with_its_strides_and_waits_as_it_is():
    """On a GPU attention refuses a mask with rows that are not aligned: torch pads the rows, and expands the mask."""

    class Masked(nn.Module):
        def forward(self, x, mask):
            return x * mask

    layer = Masked()
    offload_activations(layer, SimpleNamespace(blocks=lambda model: [model]))
    mask = torch.randn(2, 1, 1, 16)[..., :6].expand(2, 3, 5, 6)
    saved = layer(torch.randn(2, 3, 5, 6, requires_grad=True), mask).grad_fn._saved_other
    assert torch.equal(saved, mask)
    assert saved.stride() == mask.stride()
    assert saved.untyped_storage().nbytes() == (16 + 6) * 4
