"""Engines over a tiny model, new or from a checkpoint, with a step and a save."""

import json

import torch
from commands import ROOT
from stepping import one_batch
from tiny_models import SANA

from bigdit import checkpoint, engines, models
from bigdit.loader.batch import Batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import EmaSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

CPU = torch.device("cpu")
ADAMW = OptimizerSpec(lr=1e-3)
IN_GROUPS = OptimizerSpec(lr=1e-3, weight_decay=0.1, decayed="matrices")


def strategy(engine="single", world_size=1, stage=None, **options):
    """A strategy, with DeepSpeed's document for `stage`."""
    document = None
    if stage is not None:
        document = json.loads((ROOT / "ds_configs/zero2_bf16.json").read_text())
        document["zero_optimization"] |= {"stage": stage}
    options = {"gradient_clipping": None, "optimizer": ADAMW, "ema": EmaSpec(widths=(0.05, 0.1))} | options
    return Strategy(engine=engine, world_size=world_size, ds_config=document, **options)


def started(wanted, world, *, seed=0, found=None):
    """An engine with its EMA and step, over fresh weights or a checkpoint's."""
    family = models.family(SANA.class_name)
    model = models.build(SANA, device="cpu", dtype=engines.compute_dtype(wanted), seed=seed)
    models.equip(model, family, wanted)
    peers = checkpoint.Peers(world)
    if found is not None:
        checkpoint.check_resumable(found, SANA, wanted)
        checkpoint.verify(found, peers)
        checkpoint.load_weights(found, model)
    engine = engines.create(wanted, model, family, device=CPU)
    ema = engines.ema_of(engine)
    if found is not None:
        checkpoint.restore(found, engine, peers, ema)

    def step():
        of_samples = world.of_samples(wanted.cp)
        each = max(1, 2 // of_samples.world_size)
        first = of_samples.rank * each % 2  # a third process trains on the first one's sample
        mine = slice(first, first + each)
        whole = one_batch()
        mine = Batch(whole.latents[mine], whole.text_embeds[mine], whole.text_mask[mine], whole.seeds[mine])
        train_step(engine, family, FlowMatchingSpec(), [mine], lr=1e-3, ema=ema)

    return engine, ema, step, peers


def save(folder, engine, ema, peers):
    described = {"model": SANA.model_dump(mode="json"), "strategy": engine.strategy.model_dump(mode="json")}
    with checkpoint.Saver(folder, peers, checkpoint.Keeping(1)) as saver:
        saver.save(engine, ema, 1, described | {"run": {}, "data": None}, snapshot=ema is not None)
