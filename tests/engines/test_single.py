"""The single engine's own step: chunks, steps in the backward pass, precisions, and resuming from a saved state."""

import pytest
import torch
from stepping import Executed, equipped, one_batch, started
from tiny_models import THREE_BLOCKS as WIDE  # with weights of at least 4,096 elements, which are quantised
from whole import full_weights

from bigdit import checkpoint, engines, models
from bigdit.engines import backward, single
from bigdit.engines.backward import LossScaler
from bigdit.engines.state import state_slices
from bigdit.errors import UserError
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import LoraSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step


def adapted(strategy):
    """An engine over fresh weights with the strategy's adapters, and its family."""
    family, model = equipped(strategy, WIDE)
    return engines.create(strategy, model, family, device=torch.device("cpu")), family


def step(engine, family, lr=1e-3):
    """The result of one step on a fixed batch."""
    return train_step(engine, family, FlowMatchingSpec(), [one_batch()], lr=lr)


def weights(engine):
    return full_weights(engine)


def equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def trained(strategy, steps=3):
    """Weights after a few steps on one batch, and the norms of the gradients."""
    engine, family = started(strategy)
    results = [step(engine, family, lr=1e-3 * (i + 1)) for i in range(steps)]
    return weights(engine), [result.grad_norm for result in results]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_chunks_change_no_number(monkeypatch, optimizer):
    strategy = Strategy(gradient_clipping=0.5, optimizer=OptimizerSpec(name=optimizer, lr=1e-3, weight_decay=0.1))
    whole, norms = trained(strategy)
    monkeypatch.setattr(single, "CHUNK_BYTES", 2000)
    chunked, same_norms = trained(strategy)
    assert equal(whole, chunked)
    assert norms == same_norms


def test_chunks_hold_every_pair_in_order_and_in_bounds():
    sizes = [10, 10, 40, 1, 30, 5]
    pairs = [(torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size)) for size in sizes]
    chunks = list(single.chunks(pairs, 100))
    assert [[len(master) for _, master in chunk] for chunk in chunks] == [[10, 10], [40], [1], [30], [5]]


def test_gradients_of_adapters_come_to_fp32_by_lists_and_change_no_number(monkeypatch):
    """As one list, and a copy an adapter without lists. The masters that stepped are also copied."""
    found = []
    for most in (single.LIST_BYTES, 0):
        monkeypatch.setattr(single, "LIST_BYTES", most)
        engine, family = adapted(Strategy(lora=LoraSpec(rank=2), gradient_clipping=0.5))
        with Executed() as executed:
            norm = step(engine, family).grad_norm
        found.append((weights(engine), norm, executed.counts[torch.ops.aten._foreach_copy_.default]))
    (lists, norm, by_lists), (one_by_one, same_norm, by_one) = found
    assert equal(lists, one_by_one)
    assert norm == same_norm
    assert (by_lists, by_one) == (1 + 1, len(engine.masters) + 1)


def test_clipping_agrees_with_torch():
    """bf16 gradients are measured and scaled in fp32, as by clip_grad_norm_ of their fp32 copies."""
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (3, 50, 1000)]
    parameters = [torch.nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.float()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(single._norm(gradients), norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *(("adamw", "fp32"), ("adamw", "bf16"), ("adamw_8bit", "bf16"), ("adamw_8bit_ao", "tf32")),
        *(("came_8bit", "bf16"), ("adafactor", "fp32")),
    ],
)
def test_steps_in_the_backward_pass_change_no_number(optimizer, precision):
    """Even if the learning rate changes from step to step."""
    spec = OptimizerSpec(name=optimizer, lr=1e-3, weight_decay=0.1)
    after, _ = trained(Strategy(precision=precision, optimizer=spec, gradient_clipping=None))
    within, _ = trained(
        Strategy(precision=precision, optimizer=spec, gradient_clipping=None, optimizer_in_backward=True)
    )
    assert equal(after, within)


def test_no_gradient_outlives_the_backward_pass():
    engine, family = started(Strategy(optimizer_in_backward=True, gradient_clipping=None))
    step(engine, family)
    assert all(param.grad is None for param in (*engine.model.parameters(), *engine.masters))
    assert len(engine.optimizer.state) == len(engine.masters)
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [len(engine.masters)]


def test_bf16_sr_keeps_bf16_weights_and_no_masters():
    engine, family = started(Strategy(precision="bf16_sr"))
    before = weights(engine)
    step(engine, family, lr=1e-5)  # too small a step for weights near 1: most would not change if rounded to nearest
    assert all(master is param for master, param in zip(engine.masters, engine.model.parameters(), strict=True))
    assert {master.dtype for master in engine.masters} == {torch.bfloat16}
    assert not equal(before, weights(engine))


@pytest.mark.parametrize("clipping", [None, 0.5])
def test_fp16_scales_the_loss_and_takes_the_scale_out_again(monkeypatch, clipping):
    """No number depends on a power of two, as long as nothing overflows and hardly anything vanishes."""
    strategy = Strategy(precision="fp16", gradient_clipping=clipping)
    results = []
    for scale in (1024.0, 16384.0):
        monkeypatch.setattr(backward, "INITIAL_SCALE", scale)
        results.append(trained(strategy))
    (some, norms), (others, same_norms) = results
    torch.testing.assert_close(norms, same_norms, rtol=1e-4, atol=0)
    start = weights(started(strategy)[0])
    apart, way = (sum((some[name] - far[name]).norm() ** 2 for name in some) ** 0.5 for far in (others, start))
    assert apart < 0.01 * way


def test_a_step_whose_gradients_overflow_fp16_is_passed_over(monkeypatch):
    monkeypatch.setattr(backward, "INITIAL_SCALE", 2.0**40)
    engine, family = started(Strategy(precision="fp16", gradient_clipping=1.0))
    before = weights(engine)
    result = step(engine, family)
    assert not torch.isfinite(result.grad_norm)
    assert equal(before, weights(engine))
    assert not engine.optimizer.state
    assert engine.scaler.scale == 2.0**39
    while equal(before, weights(engine)):  # until the scale is low enough
        step(engine, family)
    assert 0 < engine.scaler.scale < 2.0**39
    assert all(param.grad is None for param in engine.model.parameters())


def test_the_loss_scale_follows_the_rule_of_torch_s_own(monkeypatch):
    monkeypatch.setattr(backward, "GROWTH_INTERVAL", 3)
    ours = LossScaler()
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    for overflow in (0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0):
        param.grad = torch.full((2,), torch.inf if overflow else 1.0)
        theirs.scale(torch.zeros(1))
        theirs.step(optimizer)
        theirs.update()
        assert ours.overflowed(torch.linalg.vector_norm(param.grad)) == bool(overflow)
        assert ours.scale == theirs.get_scale()


def test_tf32_is_on_where_it_is_asked_for_and_nowhere_else():
    for precision, wanted in (("tf32", "tf32"), ("fp32", "ieee"), ("bf16", "ieee")):
        started(Strategy(precision=precision))
        assert torch.backends.cuda.matmul.fp32_precision == wanted
        assert torch.backends.cudnn.conv.fp32_precision == wanted


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *(("adamw", "fp16"), ("adamw", "bf16_sr"), ("adamw_8bit", "bf16"), ("lion_8bit", "fp32")),
        *(("adamw_8bit_ao", "bf16"), ("adamw_4bit_ao", "bf16_sr"), ("adafactor", "bf16")),
        *(("came", "bf16"), ("came_8bit", "bf16_sr"), ("prodigy", "bf16"), ("adamw_schedulefree", "bf16")),
        *(("adamw_schedulefree", "fp32"), ("muon", "bf16")),
    ],
)
def test_the_step_after_a_resume_is_the_one_that_would_have_come(monkeypatch, tmp_path, optimizer, precision):
    """Through a checkpoint, into an engine with other weights: state and loss scale. Random numbers depend on the
    step."""
    monkeypatch.setattr(backward, "INITIAL_SCALE", 64.0)
    strategy = Strategy(precision=precision, optimizer=OptimizerSpec(name=optimizer, lr=1e-3))
    engine, family = started(strategy, WIDE)
    for _ in range(2):
        step(engine, family)
    found, before = saved(engine, tmp_path), weights(engine)
    held = {name: place.tensor.clone() for name, place in state_slices(engine, None, 0).items()}
    torch.manual_seed(2)
    step(engine, family)
    expected = weights(engine)
    assert not equal(before, expected)

    resumed, family = resume(found, strategy)
    again = {name: place.tensor for name, place in state_slices(resumed, None, 0).items()}
    assert equal(again, held)
    torch.manual_seed(2)
    step(resumed, family)
    assert equal(weights(resumed), expected)


def test_a_state_of_another_optimizer_is_refused(tmp_path):
    engine, family = started(Strategy(), WIDE)
    step(engine, family)
    with pytest.raises(UserError, match=r"does not hold local\.0\.0\..*: it is of another model or optimizer"):
        resume(saved(engine, tmp_path), Strategy(optimizer=OptimizerSpec(name="came")))


def saved(engine, folder):
    """An engine's checkpoint."""
    described = {"model": WIDE.model_dump(), "strategy": engine.strategy.model_dump(), "run": {}, "data": None}
    with checkpoint.Saver(folder, checkpoint.Peers(), checkpoint.Keeping(1)) as saver:
        saver.save(engine, None, 2, described)
    return checkpoint.latest(folder)[0]


def resume(found, strategy):
    """An engine that starts with other weights and resumes from a checkpoint, and its family."""
    family = models.family(WIDE.class_name)
    model = models.build(WIDE, device="cpu", dtype=engines.compute_dtype(strategy), seed=1)
    checkpoint.load_weights(found, model)
    engine = engines.create(strategy, model, family, device=torch.device("cpu"))
    checkpoint.restore(found, engine, checkpoint.Peers())
    return engine, family
