"""Block swap changes where frozen weights wait, and no number."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from commands import DIGITS, HELPERS, ROOT, SINGLE, TINY, run_command
from gpus import answers
from stepping import equipped, one_batch
from tiny_models import DEEP_FLUX, DIT
from torch.utils._python_dispatch import TorchDispatchMode
from training import exported, run_to
from whole import full_weights

from bigdit import engines, models
from bigdit.catalog.resolve import model_spec
from bigdit.config.stages import load_run
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.memory import pinned_bytes
from bigdit.models import swap
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import EmaSpec, LoraSpec, OptimizerSpec, Strategy
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.step import train_step

CPU = torch.device("cpu")
BLOCKS = 5
FULL = {
    "lora": None,
    "precision": "bf16_sr",
    "optimizer_in_backward": True,
    "gradient_clipping": None,
    "checkpointed_blocks": "all",
}
POLICIES = {
    "adafactor": FULL | {"optimizer": OptimizerSpec(name="adafactor", lr=1e-2)},
    "adamw": FULL | {"ema": EmaSpec(decay=0.5)},
    "full": {"checkpointed_blocks": BLOCKS - 1},
    "offload": {"checkpointed_blocks": "all", "offload_activations": True},
    "dora": {"checkpointed_blocks": "all", "lora": LoraSpec(rank=4, dora=True)},
    "lokr": {"checkpointed_blocks": "all", "lora": LoraSpec(kind="lokr", rank=4)},
    "loha": {"checkpointed_blocks": "all", "lora": LoraSpec(kind="loha", rank=4)},
    "int8": {"checkpointed_blocks": "all", "lora": LoraSpec(base="int8", rank=4)},
    "fp8": {"checkpointed_blocks": "all", "lora": LoraSpec(base="fp8", rank=4, dora=True)},
    "nf4": {"checkpointed_blocks": "all", "lora": LoraSpec(base="nf4", rank=4)},
    "nf4 dora": {"checkpointed_blocks": BLOCKS - 1, "lora": LoraSpec(base="nf4", rank=4, dora=True)},
}


def lora(blocks_to_swap: int = 0, **policy):
    policy = {"lora": LoraSpec(rank=4), "optimizer": OptimizerSpec(lr=1e-2), "checkpointed_blocks": "all"} | policy
    return Strategy(blocks_to_swap=blocks_to_swap, **policy)


def batch(seed=0):
    pooled = torch.randn(2, 10, generator=torch.Generator().manual_seed(seed))
    return dataclasses.replace(one_batch(seed), extras={"pooled_text": pooled})


def started(strategy, spec=DEEP_FLUX):
    family, model = equipped(strategy, spec)
    return family, engines.create(strategy, model, family, device=CPU)


def trained(strategy):
    """Losses of two steps with an image sampled between them, the image, the adapters, and all weights as stored."""
    family, engine = started(strategy)
    torch.manual_seed(0)  # for stochastic rounding
    batches = [batch(seed) for seed in range(1 if strategy.optimizer_in_backward else 2)]
    losses = [train_step(engine, family, FlowMatchingSpec(), batches, lr=1e-2).loss.item()]
    with engine.evaluating():
        given = batches[0].to(CPU, torch.bfloat16)
        drawn = family.predict(engine.model, given.latents.bfloat16(), torch.tensor([0.2, 0.7]), given)
    losses.append(train_step(engine, family, FlowMatchingSpec(), batches, lr=1e-2).loss.item())
    return losses, drawn, full_weights(engine), dict(engine.model.named_parameters())


def check_same(one, other):
    (losses, drawn, *named), (others, same, *like) = one, other
    assert losses == others
    assert torch.equal(drawn, same)
    for tensors, equal in zip(named, like, strict=True):
        assert tensors.keys() == equal.keys()
        assert all(torch.equal(tensors[name], equal[name]) for name in tensors)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_swapped_blocks_change_no_number(policy):
    """A CPU copies at once, as early as a device may. It would overwrite weights that are still needed."""
    plain = trained(lora(**policy))
    for count in (3, BLOCKS - 1):
        check_same(trained(lora(count, **policy)), plain)


class Late(TorchDispatchMode):
    """A device whose streams copy as late as they may: when the computing stream waits for them."""

    def __init__(self):
        super().__init__()
        self.queue = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.queue.append((func, args, kwargs))
        return args[0]

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self):
        return SimpleNamespace(wait_stream=self.finish)

    def stream(self, stream):
        return self

    def finish(self, copies):
        for func, args, kwargs in self.queue:
            func(*args, **kwargs)
        self.queue.clear()


def test_nothing_is_computed_before_its_weights_have_come(monkeypatch):
    plain, late = trained(lora()), Late()
    monkeypatch.setattr(torch, "get_device_module", lambda device: late)
    check_same(trained(lora(BLOCKS)), plain)


def test_two_blocks_at_most_are_on_the_device_and_the_next_one_comes_ahead(monkeypatch):
    """A block's weights are copied once for each pass. The backward pass does not copy those that are still there."""
    brought = []
    bring = swap.Swap._bring

    def watched(self, number):
        before = list(self._held)
        bring(self, number)
        if self._held != before:
            brought.append(number)

    monkeypatch.setattr(swap.Swap, "_bring", watched)
    family, engine = started(lora(BLOCKS))
    for _ in range(2):
        train_step(engine, family, FlowMatchingSpec(), [batch()], lr=1e-2)
    assert brought == [0, 1, 2, 3, 4, 2, 1, 0, 2, 3, 4, 2, 1, 0]
    places = {w.untyped_storage().data_ptr() for rooms in engine.model.swap._in_room for w in rooms}
    assert len(places) == swap.ROOMS


def test_weights_are_back_where_a_block_fails():
    family, engine = started(lora(3))
    before = {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()}
    with pytest.raises(TypeError):
        family.blocks(engine.model)[1].forward("no tensor", "nor this", "nor this")
    assert before == {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()}


def test_what_is_called_from_outside_of_its_block_stays():
    """DiT asks the first block for the time's embedding after all blocks have run."""
    gradients = []
    for count in (0, 3):
        family, engine = started(lora(count), DIT)
        latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
        given = Batch(latents, None, None, (1, 2), {"class_label": torch.tensor([1, 2])})
        family.predict(engine.model.eval(), latents, torch.tensor([0.1, 0.6]), given).square().mean().backward()
        gradients.append({name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None})
    plain, swapped = gradients
    assert plain.keys() == swapped.keys() != set()
    assert all(torch.equal(plain[name], swapped[name]) for name in plain)
    shared = {parameter for module in family.shared(engine.model) for parameter in module.parameters()}
    assert shared
    assert not shared & {parameter for block in engine.model.swap.blocks for parameter in block.parameters}


@pytest.mark.parametrize("megabytes", [[648] * 4, [270] * 9, [72, 108, 108, 9] * 3, [1500, 3, 1500], [1]], ids=str)
def test_no_other_cut_locks_less(megabytes):
    """Of all partitions into runs of consecutive weights within the limit, or of one weight."""
    weights = [SimpleNamespace(nbytes=size << 20) for size in megabytes]
    found = swap._runs(weights)
    assert [weight for run in found for weight in run] == weights
    possible = (cut(weights, cuts) for cuts in itertools.product([False, True], repeat=len(weights) - 1))
    assert locked(found) == min(locked(runs) for runs in possible if allowed(runs))


def cut(weights, cuts):
    runs = [[weights[0]]]
    for weight, here in zip(weights[1:], cuts, strict=True):
        if here:
            runs.append([])
        runs[-1].append(weight)
    return runs


def allowed(runs):
    return all(len(run) == 1 or total(run) <= swap.MOST_LOCKED_AT_ONCE for run in runs)


def total(run):
    return sum(weight.nbytes for weight in run)


def locked(runs):
    return sum(pinned_bytes(total(run)) for run in runs)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match=r"strategy\.blocks_to_swap is 9, and the model has 5 blocks"):
        equipped(lora(9), DEEP_FLUX)
    with pytest.raises(ValueError, match=r"blocks_to_swap is 2, and the weights of two blocks .*set it to 3 or more"):
        lora(2)
    with pytest.raises(ValueError, match=r"blocks_to_swap .*, and engine is fsdp2, .*; use engine ddp"):
        lora(3, engine="fsdp2", world_size=2)
    with pytest.raises(
        ValueError, match=r"blocks_to_swap .*precision is bf16 .*; set precision to bf16_sr .*or set lora"
    ):
        lora(3, lora=None)
    with pytest.raises(ValueError, match=r"blocks_to_swap is 4, and checkpointed_blocks is 3: .* set .* to 4 or more"):
        lora(4, checkpointed_blocks=3)
    with pytest.raises(
        ValueError, match=r"blocks_to_swap .*, and checkpointing is selective, .*; set checkpointing to full"
    ):
        lora(3, checkpointing="selective")


SHORT = """
import os, resource, sys, torch
sys.path[:0] = os.environ["HELPERS"].split(":")
from torch import nn
from bigdit.errors import guard
from bigdit.models.swap import Swap, _Weights

model = nn.ModuleList(nn.Linear(4096, 4096, bias=False).requires_grad_(False) for _ in range(3))  # of 64 MiB each
swap = Swap([_Weights(block, [], False) for block in model])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))
sys.exit(guard(lambda: swap.moved(model, torch.device("cpu")) and 0))
"""


def test_a_host_that_has_no_room_for_the_weights_is_a_line():
    done = run_command(sys.executable, "-c", SHORT, HELPERS=HELPERS, PYTHONPATH=str(ROOT))
    assert done.returncode == 1, done.stderr
    line, *more = [each for each in done.stderr.splitlines() if each]
    assert not more, done.stderr
    assert re.match(
        r"error: strategy\.blocks_to_swap: 0\.19 GiB of weights need page-locked CPU memory, which ran out: "
        r"(64\.00 MiB|0\.12 GiB) were requested, ",  # two blocks, or the third where a freed arena held the two
        line,
    )
    assert line.endswith("; swap fewer blocks, or raise what limits this process (ulimit -l and -v, its container)")


RUNS = {
    "adapters over nf4": ("strategy.lora.rank=4", "strategy.lora.base=nf4"),
    "all weights": (
        *("strategy.precision=bf16_sr", "strategy.optimizer_in_backward=true", "strategy.gradient_clipping=null"),
        *("strategy.optimizer.name=adafactor", "strategy.global_batch_size=8"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS.values(), ids=RUNS)
def test_a_run_with_swapped_blocks_is_the_same_run(tmp_path, features, kind):
    """With validation images, validation losses, exports of EMA and weights; and it resumes from a checkpoint."""
    deep = "model.kwargs.num_layers=4"
    spec = model_spec(load_run(DIGITS, [*TINY, *SINGLE, deep]).model)
    models.build(spec, device="cpu", dtype=torch.float32, seed=0).save_pretrained(tmp_path / "base")
    settings = (deep, f"model.init_from={tmp_path / 'base'}", *kind, "strategy.checkpointed_blocks=all")
    settings = (*settings, "strategy.ema.decay=0.5", "train.checkpoint_every=2", "validation.samples=8")
    settings = (*settings, "validation.every=2", "samples.captions=['a one','a two']", "samples.every=2")
    settings = (*settings, "samples.steps=2")
    torch.manual_seed(0)  # of stochastic rounding, which a checkpoint keeps
    plain = run_to(4, tmp_path / "plain", features, *settings)
    torch.manual_seed(0)
    run_to(2, tmp_path / "swapped", features, *settings, "strategy.blocks_to_swap=3")
    swapped = run_to(4, tmp_path / "swapped", features, *settings, "strategy.blocks_to_swap=3")
    for folder in ("transformer", "transformer_ema"):
        one, other = exported(plain, folder), exported(swapped, folder)
        assert one.keys() == other.keys() != set()
        assert all(torch.equal(one[name], other[name]) for name in one)
    rows = [[numbers(row) for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("plain", "swapped")]
    assert rows[0] == rows[1]
    for step in (2, 4):
        file = f"samples/step-{step:08d}.png"
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "swapped" / file).read_bytes()


def numbers(row):
    return {key: value for key, value in row.items() if "loss" in key or key == "grad_norm"}


ON_GPU = """
import dataclasses, json, os, sys, torch
sys.path[:0] = os.environ["HELPERS"].split(":")
from stepping import equipped, one_batch
from bigdit import engines
from bigdit.dist import World
from bigdit.strategy import LoraSpec, ModelSpec, Strategy

for kernels in ("flash", "mem_efficient", "cudnn"):  # of whose results an emulated GPU computes none
    getattr(torch.backends.cuda, f"enable_{kernels}_sdp")(False)
device, found = torch.device("cuda", 0), []
spec = ModelSpec.model_validate_json(os.environ["SPEC"])
batch = dataclasses.replace(one_batch(), extras={"pooled_text": torch.ones(2, 10)}).to(device, torch.bfloat16)
for count in (0, 4):
    lora = LoraSpec(rank=4, base=os.environ["BASE"])
    strategy = Strategy(lora=lora, checkpointed_blocks="all", blocks_to_swap=count)
    family, model = equipped(strategy, spec)
    engine = engines.create(strategy, model, family, device=device)
    predictions = []
    for t in (0.2, 0.7):
        times = torch.full((2,), t, device=device)
        predictions.append(family.predict(engine.model, batch.latents.bfloat16(), times, batch).float())
        engine.backward(predictions[-1].square().mean(), last=True)
    weights = [p for p in model.parameters() if not p.requires_grad]
    found.append({
        "predictions": [each.tolist() for each in predictions],
        "pinned": sum(weight.is_pinned() for weight in weights),
        "on the GPU": sum(weight.is_cuda for weight in weights),
    })
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
def test_a_gpu_computes_the_same_with_weights_that_wait_in_pinned_memory(base):
    """On an emulated GPU, which computes small tensors such as this model's: before and after a backward pass."""
    plain, swapped = answers("a40", ON_GPU, HELPERS=HELPERS, SPEC=DEEP_FLUX.model_dump_json(), BASE=base)
    first, second = (torch.tensor(each) for each in plain["predictions"])
    assert (first - second).abs().max() > 0.1
    assert plain["predictions"] == swapped["predictions"]
    assert plain["pinned"] == 0 < swapped["pinned"]
    assert plain["on the GPU"] == swapped["on the GPU"] + swapped["pinned"]
