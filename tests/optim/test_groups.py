"""Weight decay applies to matrices alone where requested, in every optimizer and through every step."""

import re

import pytest
import torch
from stepping import equipped, one_batch, started
from tiny_models import THREE_BLOCKS as SANA  # with weights of at least 4,096 elements, which are quantised
from torch import nn
from whole import full_weights

from bigdit import models, optim
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import OPTIMIZERS, LoraSpec, ModelSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

MATRICES = {"weight_decay": 0.3, "decayed": "matrices"}
# Names of a Sana's weights that are no norm, bias or table.
NAMED = re.compile(r"(proj\w*|linear\w*|to_\w+(\.0)?|conv_\w+)\.weight$")
ON_CPU = [name for name in OPTIMIZERS if name != "paged_adamw_8bit"]
DIT = ModelSpec(name="dit", class_name="PaperDiT", kwargs={"hidden_size": 24, "depth": 1, "num_heads": 2})


def decaying(spec, model):
    """The names of the parameters in each group, by its decay."""
    names = {param: name for name, param in model.named_parameters()}
    found = optim.groups(spec, model)
    return {group["weight_decay"]: {names[param] for param in group["params"]} for group in found}


def test_norms_biases_and_tables_do_not_decay():
    model = models.build(SANA, device="cpu", dtype=torch.float32)
    found = decaying(OptimizerSpec(**MATRICES), model)
    names = {name for name, _ in model.named_parameters()}
    assert found == {
        0.3: {name for name in names if NAMED.search(name)},
        0.0: {name for name in names if not NAMED.search(name)},
    }
    assert {"scale_shift_table", "caption_norm.weight", "patch_embed.proj.bias"} <= found[0.0]
    assert {"patch_embed.proj.weight", "transformer_blocks.0.ff.conv_depth.weight"} <= found[0.3]


def test_embeddings_of_classes_do_not_decay():
    found = decaying(OptimizerSpec(**MATRICES), models.build(DIT, device="cpu", dtype=torch.float32))
    assert "y_embedder.embedding_table.weight" in found[0.0]
    assert "x_embedder.proj.weight" in found[0.3]


def test_without_a_word_all_decay_in_one_group():
    engine, _ = started(Strategy(precision="fp32", optimizer=OptimizerSpec(weight_decay=0.3)))
    (group,) = engine.optimizer.param_groups
    assert (len(group["params"]), group["weight_decay"]) == (len(list(engine.model.parameters())), 0.3)


def test_there_is_no_group_of_nothing():
    """Adapters are matrices alone."""
    strategy = Strategy(lora=LoraSpec(rank=4))
    _, model = equipped(strategy, SANA)
    (group,) = optim.groups(OptimizerSpec(**MATRICES), model)
    assert len(group["params"]) == sum(param.requires_grad for param in model.parameters())
    assert group["weight_decay"] == 0.3


def trained(strategy, steps, lr=1e-2):
    engine, family = started(strategy, SANA)
    for step in range(steps):
        train_step(engine, family, FlowMatchingSpec(), [one_batch(step)], lr=lr)
    return full_weights(engine)


@pytest.mark.parametrize(
    ("name", "precision", "in_backward"),
    [
        *((name, "fp32", False) for name in ON_CPU),
        *(
            (name, "bf16", False)
            for name in ("adamw", "adamw_8bit", "came_8bit", "prodigy", "adamw_schedulefree", "muon")
        ),
        *((name, "fp32", True) for name in ("adamw", "adamw_8bit", "adamw_8bit_ao", "came", "muon")),
    ],
)
def test_decay_takes_its_share_of_matrices_and_of_nothing_else(name, precision, in_backward):
    """Decay is decoupled: a step with it equals one without it, less lr × decay × the weights before."""
    ways = {}
    for decay in (0.0, 0.5):
        optimizer = OptimizerSpec(name=name, weight_decay=decay, decayed="matrices")
        unclipped = {"gradient_clipping": None, "optimizer_in_backward": in_backward}
        strategy = Strategy(precision=precision, optimizer=optimizer, **unclipped)
        ways[decay] = trained(strategy, steps=1, lr=1e4 if name == "prodigy" else 1e-2)  # of its first estimate, 1e-6
    before = trained(Strategy(precision=precision), steps=0)
    for key, without in ways[0.0].items():
        share = 1e-2 * 0.5 * before[key] if NAMED.search(key) else torch.zeros_like(without)
        torch.testing.assert_close(without - ways[0.5][key], share, rtol=1e-3, atol=2e-7)
    assert any(not torch.equal(ways[0.0][key], ways[0.5][key]) for key in before)


def test_steps_are_those_of_a_plain_loop_with_the_same_groups():
    """To the bit, over several steps, with each group's rate and decay."""
    optimizer = OptimizerSpec(lr=1e-2, betas=(0.9, 0.95), **MATRICES)
    ours = trained(Strategy(precision="fp32", optimizer=optimizer), steps=4)

    engine, family = started(Strategy(precision="fp32"), SANA)  # for its weights and its gradients
    named = dict(engine.model.named_parameters())
    theirs = torch.optim.AdamW(
        [
            {"params": [param for name, param in named.items() if NAMED.search(name)], "weight_decay": 0.3},
            {"params": [param for name, param in named.items() if not NAMED.search(name)], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        fused=True,
    )
    engine.optimizer = theirs
    for step in range(4):
        train_step(engine, family, FlowMatchingSpec(), [one_batch(step)], lr=1e-2)
    assert all(torch.equal(ours[name], param.detach().flatten()) for name, param in named.items())


def test_a_stochastically_rounded_step_has_both_groups():
    """Of weights with zero gradients, bf16 without masters changes only those that decay."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(torch.bfloat16)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for spec in (OptimizerSpec(name=name, **MATRICES) for name in ("adamw", "came", "adamw_8bit_ao")):
        optimizer = optim.build(spec, optim.groups(spec, model), stochastic_rounding=True)
        optim.set_lr(optimizer, 0.5)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        same = {name for name, param in model.named_parameters() if torch.equal(param, before[name])}
        assert same == {"0.bias", "1.weight", "1.bias"}
