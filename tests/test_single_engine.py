"""The single engine's own step: chunks of fp32 gradients change memory, and nothing else."""

import pytest
import torch
from test_rehearse import SHAPE, TINY

from bigdit import engines, models
from bigdit.dist import World
from bigdit.engines import single
from bigdit.loader.batch import Batch
from bigdit.spec import ObjectiveSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step


def trained(strategy, steps=3):
    """Weights after a few steps on one batch, and the gradient norms."""
    family = models.family(TINY.class_name)
    model = models.build(TINY, device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
    engine = engines.create(strategy, model, family, device=torch.device("cpu"), world=World())
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *SHAPE.latents, generator=generator)
    text = torch.randn(2, *SHAPE.text, generator=generator)
    batch = Batch(latents, text, torch.ones(2, SHAPE.text[0]), (1, 2))
    results = [train_step(engine, family, ObjectiveSpec(), [batch], lr=1e-3) for _ in range(steps)]
    return dict(engine.full_weights()), [result.grad_norm for result in results]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_chunks_change_no_number(monkeypatch, optimizer):
    strategy = Strategy(gradient_clipping=0.5, optimizer=OptimizerSpec(name=optimizer, lr=1e-3, weight_decay=0.1))
    whole, norms = trained(strategy)
    monkeypatch.setattr(single, "CHUNK_BYTES", 2000)
    chunked, same_norms = trained(strategy)
    assert all(torch.equal(whole[name], chunked[name]) for name in whole)
    assert norms == same_norms


def test_chunks_hold_every_pair_in_order_and_in_bounds(monkeypatch):
    monkeypatch.setattr(single, "CHUNK_BYTES", 100)
    sizes = [10, 10, 40, 1, 30, 5]
    pairs = [(torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size)) for size in sizes]
    chunks = list(single._chunks(pairs))
    assert [[len(master) for _, master in chunk] for chunk in chunks] == [[10, 10], [40], [1], [30], [5]]


def test_clipping_agrees_with_torch():
    """bf16 gradients are measured and scaled in fp32, as clip_grad_norm_ does with their fp32 copies."""
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (3, 50, 1000)]
    parameters = [torch.nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.float()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(single._norm(gradients), norm, rtol=1e-6, atol=0)
