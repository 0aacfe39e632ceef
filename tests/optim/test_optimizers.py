"""Optimizers by name: numbers beside the papers' and torch's, bytes a parameter, learning, rounding, shards."""

import importlib.util
import math
from contextlib import nullcontext
from typing import get_args

import prodigyopt
import pytest
import schedulefree
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from two_processes import answer_of_two

from bigdit import optim
from bigdit.errors import UserError
from bigdit.optim.factored import round_to_bf16_
from bigdit.strategy import OPTIMIZERS, PACKAGES, OptimizerName, OptimizerSpec

ON_CPU = [name for name in OPTIMIZERS if name != "paged_adamw_8bit"]


def test_each_has_a_title():
    assert [*OPTIMIZERS] == [*get_args(OptimizerName)]


def spec(name, **constants):
    return OptimizerSpec(name=name, **constants)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stepped(name, start, gradients, lr=1e-2, weight_decay=0.1):
    """The parameter after steps on the given gradients, and the optimizer."""
    param = nn.Parameter(start.clone())
    optimizer = optim.build(spec(name, lr=lr, weight_decay=weight_decay), [param])
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    return param.detach(), optimizer


def came_of_the_paper(theta, gradients, lr, weight_decay, betas=(0.9, 0.999, 0.9999)):
    """Algorithm 2 of arXiv:2307.02047 in fp64, with decoupled weight decay."""
    beta1, beta2, beta3 = betas
    eps1, eps2, d = 1e-30, 1e-16, 1.0
    theta = theta.double()
    n, m = theta.shape
    ones_n, ones_m = torch.ones(n, 1, dtype=torch.float64), torch.ones(m, 1, dtype=torch.float64)
    r, c, big_r, big_c, momentum = (
        torch.zeros(shape, dtype=torch.float64) for shape in [(n, 1), (1, m)] * 2 + [(n, m)]
    )
    for g in gradients:
        g = g.double()
        r = beta2 * r + (1 - beta2) * (g**2 + eps1) @ ones_m
        c = beta2 * c + (1 - beta2) * ones_n.T @ (g**2 + eps1)
        v = r @ c / (ones_n.T @ r)
        u = g / v.sqrt()
        u_hat = u / max(1.0, float((u**2).mean().sqrt()) / d)
        momentum = beta1 * momentum + (1 - beta1) * u_hat
        instability = (u_hat - momentum) ** 2
        big_r = beta3 * big_r + (1 - beta3) * (instability + eps2) @ ones_m
        big_c = beta3 * big_c + (1 - beta3) * ones_n.T @ (instability + eps2)
        s = big_r @ big_c / (ones_n.T @ big_r)
        theta = theta * (1 - lr * weight_decay) - lr / s.sqrt() * momentum
    return theta


def test_came_is_the_algorithm_of_the_paper():
    start, gradients = draw(7, 5), [draw(7, 5, seed=i) * 10.0 ** (i - 3) for i in range(1, 6)]
    param, _ = stepped("came", start, gradients)
    torch.testing.assert_close(param.double(), came_of_the_paper(start, gradients, 1e-2, 0.1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(7, 5), (40,)])
def test_adafactor_is_torch_s(shape):
    """Up to torch's epsilon, which is fp32's and not the paper's, and far below these gradients."""
    start, gradients = draw(*shape), [draw(*shape, seed=i) for i in range(1, 6)]
    ours, _ = stepped("adafactor", start, gradients)
    param = nn.Parameter(start.clone())
    theirs = torch.optim.Adafactor([param], lr=1e-2, weight_decay=0.1)
    for gradient in gradients:
        param.grad = gradient.clone()
        theirs.step()
    torch.testing.assert_close(ours, param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adafactor", "came", "came_8bit"])
@pytest.mark.parametrize("shape", [(96, 64, 1, 1), (96, 8, 2, 2, 2)])
def test_convolutions_are_stepped_as_matrices_in_any_memory_format(name, shape):
    gradients = [draw(96, 64, seed=i) for i in range(1, 4)]
    matrix, _ = stepped(name, draw(96, 64), gradients)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    start = draw(96, 64).view(shape).to(memory_format=last)
    convolution, _ = stepped(name, start, [g.view(shape).to(memory_format=last) for g in gradients])
    torch.testing.assert_close(convolution.reshape(96, 64), matrix, rtol=1e-6, atol=1e-6)  # sums in another order


def walked(optimizer, param, steps=20):
    """The parameter after steps down a bowl."""
    for _ in range(steps):
        param.grad = param.detach() - 1
        optimizer.step()
    return param.detach()


def test_prodigy_is_that_of_its_package(capsys):
    """Up to its sums, which are in fp32 here. It prints nothing."""
    given = {"d_coef": 2.0, "safeguard_warmup": True, "use_bias_correction": True, "weight_decay": 0.01}
    ours = nn.Parameter(draw(30, 20))
    optimizer = optim.build(spec("prodigy", **given), [ours])
    found = walked(optimizer, ours)
    assert capsys.readouterr().out == ""
    theirs = nn.Parameter(draw(30, 20))
    package = prodigyopt.Prodigy([theirs], **given)
    torch.testing.assert_close(found, walked(package, theirs), rtol=1e-5, atol=1e-5)
    rate = optim.effective_lr(optimizer, 0.5)
    assert rate == pytest.approx(package.param_groups[0]["d"] * 0.5, rel=1e-5)
    assert rate > 2 * 5e-7  # it has grown


@pytest.mark.parametrize("seen", [False, True])
def test_schedule_free_is_that_of_its_package(seen):
    """To the bit, whether its average is read on the way or not. The average equals the package's, too."""
    ours = nn.Parameter(draw(30, 20))
    optimizer = optim.build(spec("adamw_schedulefree", lr=1e-2, weight_decay=0.1), [ours])
    theirs = nn.Parameter(draw(30, 20))
    package = schedulefree.AdamWScheduleFree([theirs], lr=1e-2, weight_decay=0.1, foreach=False)
    package.train()
    for _ in range(2):
        assert torch.equal(walked(optimizer, ours), walked(package, theirs))
        with optim.averaged(optimizer) if seen else nullcontext():
            average = ours.detach().clone()
    package.eval()
    assert torch.equal(average, theirs.detach()) == seen


def test_muon_is_torch_s_in_blocks_and_adamw_elsewhere():
    """To the bit, with one rate, for a model whose second layer is its block."""
    model, other = (nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32), nn.Conv2d(32, 8, 2)) for _ in range(2))
    other.load_state_dict(model.state_dict())
    chosen = spec("muon", lr=1e-2, weight_decay=0.1)
    optimizer = optim.build(chosen, optim.groups(chosen, model, blocks=[model[1], model[2]]))
    matrix = other[1].weight
    rest = [param for param in other.parameters() if param is not matrix]
    theirs = [
        torch.optim.Muon([matrix], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1, fused=True),
    ]
    for step in range(4):
        for i, (mine, param) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
            mine.grad = draw(*param.shape, seed=100 * step + i)
            param.grad = mine.grad.clone()
        for each in (optimizer, *theirs):
            each.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert [*optimizer.state[model[1].weight]] == ["momentum_buffer"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_named(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    package = PACKAGES[name]
    with pytest.raises(
        UserError, match=rf"name: {name} needs {package}, which is missing; pip install 'bigdit\[{package}\]'"
    ):
        optim.build(spec(name), [draw(4)])


def state_bytes(optimizer, param):
    def of(tensor):
        if is_traceable_wrapper_subclass(tensor):
            return sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])
        return tensor.nbytes

    return sum(of(value) for value in optimizer.state[param].values() if torch.is_tensor(value))


MAP, COUNT = 256 * 4, 4  # a quantisation map, and Adam's step
BYTES = {
    "adamw": lambda o, i: 8 * o * i + COUNT,
    "adamw_8bit": lambda o, i: (2 + 8 / 256) * o * i + 2 * MAP,
    "lion_8bit": lambda o, i: (1 + 4 / 256) * o * i + MAP,
    "adamw_8bit_ao": lambda o, i: (2 + 8 / 256) * o * i + 2 * MAP + COUNT,
    "adamw_4bit_ao": lambda o, i: (1 + 8 / 128) * o * i + 2 * 16 * 4 + COUNT,
    "adafactor": lambda o, i: 4 * (o + i),
    "came": lambda o, i: 4 * o * i + 2 * 4 * (o + i),
    "came_8bit": lambda o, i: (1 + 4 / 256) * o * i + 2 * 4 * (o + i),
    "prodigy": lambda o, i: 16 * o * i,
    "adamw_schedulefree": lambda o, i: 8 * o * i,
    "muon": lambda o, i: 8 * o * i + COUNT,  # outside of blocks
}


@pytest.mark.parametrize("name", ON_CPU)
def test_bytes_a_parameter_on_linear_layers_and_on_1x1_convolutions(name):
    rows, columns = 2240, 1120  # of Sana-1600M's feed-forward
    for shape in [(rows, columns), (rows, columns, 1, 1)]:
        param = nn.Parameter(torch.zeros(shape))
        optimizer = optim.build(spec(name), [param])
        param.grad = torch.zeros(shape)
        optimizer.step()
        assert state_bytes(optimizer, param) == BYTES[name](rows, columns)
    assert round(BYTES["came"](rows, columns) / (rows * columns), 2) == 4.01
    assert round(BYTES["came_8bit"](rows, columns) / (rows * columns), 2) == 1.03


@pytest.mark.parametrize("name", ["adafactor", "came", "came_8bit"])
def test_a_flat_partition_keeps_its_second_moment_whole(name):
    _, optimizer = stepped(name, draw(64 * 64), [draw(64 * 64, seed=1)])
    (param,) = optimizer.param_groups[0]["params"]
    whole = {"adafactor": 4, "came": 8, "came_8bit": 2 * (1 + 4 / 256)}[name]
    assert state_bytes(optimizer, param) == whole * 64 * 64


# Adafactor's is relative to the weights. Lion and CAME take larger steps than Adam.
LR = {"adafactor": 5e-2, "lion_8bit": 3e-3, "came": 1e-3, "came_8bit": 1e-3, "prodigy": 1.0}


def train_digits(name, *, dtype=torch.float32):
    """Train a two-layer classifier of real digits. Returns the first and the last loss."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=dtype) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(dtype)
    params = list(model.parameters())
    optimizer = optim.build(spec(name, lr=LR.get(name, 1e-2)), params, stochastic_rounding=dtype == torch.bfloat16)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", ON_CPU)
def test_digits_are_learned(name):
    first, last = train_digits(name)
    assert last < first / 4


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit_ao", "adafactor", "came", "came_8bit"])
def test_digits_are_learned_by_bf16_weights_without_masters(name):
    first, last = train_digits(name, dtype=torch.bfloat16)
    assert last < first / 4


@pytest.mark.parametrize(("whole", "quantised"), [("came", "came_8bit"), ("adamw", "adamw_8bit")])
def test_8_bits_stay_within_2_percent_of_the_way_of_32(whole, quantised):
    """Weights after 20 steps with the same gradients, beside Adam's: their distance as a share of the way."""
    start = draw(96, 64)
    gradients = [draw(96, 64, seed=i) + draw(96, 64, seed=1000) / 2 for i in range(1, 21)]
    far, _ = stepped(whole, start, gradients, lr=1e-3)
    near, _ = stepped(quantised, start, gradients, lr=1e-3)
    assert 0 < (far - near).norm() < 0.02 * (far - start).norm()


def test_rounding_is_right_on_ema_and_gives_bf16():
    step = 2.0**-7  # between neighbours of bf16 from 1 on
    values = torch.cat([torch.full((100_000,), 1 + 0.3 * step), torch.full((100_000,), -1 - 0.3 * step)])
    torch.manual_seed(0)
    rounded = round_to_bf16_(values.clone())
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert set(rounded.tolist()) == {1.0, 1 + step, -1.0, -1 - step}
    # five standard deviations of a mean of 100,000 draws
    bound = 5 * step * math.sqrt(0.3 * 0.7 / 100_000)
    assert abs(rounded[:100_000].mean() - values[0]) < bound
    assert abs(rounded[100_000:].mean() - values[-1]) < bound
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-100])
    assert torch.equal(round_to_bf16_(exact.clone()), exact)


@pytest.mark.parametrize("name", ON_CPU)
def test_the_learning_rate_is_that_of_the_coming_step(name):
    """Also if torchao keeps it in a tensor."""
    param = nn.Parameter(draw(64, 64))
    start = param.detach().clone()
    optimizer = optim.build(spec(name, lr=1e-2), [param])
    optim.set_lr(optimizer, 0.0)
    param.grad = draw(64, 64, seed=1)
    optimizer.step()
    assert torch.equal(param, start)
    optim.set_lr(optimizer, 1e-2)
    optimizer.step()
    assert not torch.equal(param, start)


@pytest.mark.parametrize("name", ["adamw_8bit_ao", "adamw_4bit_ao"])
def test_torchao_compiles_nothing_and_asks_torch_for_nothing(name, monkeypatch):
    def asked(*args, **kwargs):
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", asked)
    start = draw(64, 64)
    moved, _ = stepped(name, start, [draw(64, 64, seed=1)])
    assert not torch.equal(moved, start)
    assert torch.compile is asked  # as it was before the step


def test_paged_state_is_refused_on_cpu_weights():
    param = nn.Parameter(torch.zeros(4))
    optimizer = optim.build(spec("paged_adamw_8bit"), [param])
    param.grad = torch.ones(4)
    with pytest.raises(UserError, match=r"paged_adamw_8bit .* on the CPU; use strategy.optimizer.name adamw_8bit"):
        optimizer.step()


SHARDED = """
import json
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
from bigdit import optim
from bigdit.strategy import OPTIMIZERS, OptimizerName, OptimizerSpec

def draw(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

dist.init_process_group("gloo")
row = init_device_mesh("cpu", (2,))
square = init_device_mesh("cpu", (1, 2))
apart = {}
# Even and uneven rows, convolutions, vectors, and fewer rows than processes. In 8 bits, shards of whole blocks: there
# a block is quantised alike wherever it lies.
SHAPES = [(128, 96), (128, 64, 1, 1), (8192,)]
MORE = [(7, 24), (16, 3, 2, 2), (33,), (1, 5)]
MATRICES = [(128, 96), (96, 128), (7, 24), (1, 5)]
for name, shapes in {
    "came": SHAPES + MORE, "adafactor": SHAPES + MORE, "came_8bit": SHAPES, "muon": MATRICES
}.items():
    for shape in shapes:
        whole = nn.Parameter(draw(shape, 0))
        parts = [nn.Parameter(distribute_tensor(draw(shape, 0), mesh, [*([Replicate()] * (mesh.ndim - 1)), Shard(0)]))
                 for mesh in (row, square)]
        for param in (whole, *parts):
            group = {"params": [param]} | ({"muon": True} if name == "muon" else {})
            optimizer = optim.build(OptimizerSpec(name=name, lr=1e-2, weight_decay=0.1), [group])
            for seed in range(1, 5):
                gradient = draw(shape, seed)
                sharded = param is not whole
                param.grad = distribute_tensor(gradient, param.device_mesh, param.placements) if sharded else gradient
                optimizer.step()
        way = (whole.detach() - draw(shape, 0)).abs().max()
        for part in parts:
            off = (part.detach().full_tensor() - whole.detach()).abs() / way > 1e-5
            apart[name] = max(apart.get(name, 0.0), off.float().mean().item())
if dist.get_rank() == 0:
    json.dump(apart, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_steps_are_those_of_the_whole(tmp_path):
    """Row means belong to a process; column means and clipping are summed over all. Muon's matrices are gathered."""
    apart = answer_of_two(SHARDED, tmp_path)
    # In 8 bits the last digit of a value may decide between two codes.
    assert apart["came"] == apart["adafactor"] == apart["muon"] == 0
    assert apart["came_8bit"] < 1e-3
