"""Compare context parallelism on several processes with one process, by name. Prints a line of JSON.

It has the largest differences of the loss, of each gradient, and of the losses and weights of later steps. Without
names, four processes run each family, two or four a sample, by Ulysses, by rings (`ring`) and by rings of two
(`rings`), plain and compiled. One family runs with each engine and setting, two processes a sample.

Named families take two steps, all processes a sample. On four processes rings of two run, too, and the settings in
FOUR. The others run on two.

    torchrun --nproc-per-node 4 tests/engines/context.py [FAMILY …]
    torchrun --nproc-per-node 2 tests/engines/context.py FAMILY …
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bigdit import engines, models
from bigdit.catalog.context import CONTEXTS
from bigdit.dist import World, world_from_env
from bigdit.engines.state import state_slices
from bigdit.loader.batch import Batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import LoraSpec, ModelSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

NAMED, PROCESSES = sys.argv[1:], int(os.environ["WORLD_SIZE"])
STEPS = 2 if NAMED else 10
SAMPLES, TEXT = 4, (8, 8)
UNEVEN = 7
"""Tokens of a text that is not split: no degree divides them. Texts and images beside it have as many."""
HEADS = {"num_attention_heads": 4, "attention_head_dim": 12}
PACKED = HEADS | {"in_channels": 16, "num_layers": 2, "joint_attention_dim": 8}
QWEN = PACKED | {"out_channels": 4, "axes_dims_rope": [4, 4, 4]}
WAN = HEADS | {"in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
LTX = HEADS | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 48, "num_layers": 2, "caption_channels": 8}
HUNYUAN = (
    HEADS
    | {"in_channels": 9, "out_channels": 4, "num_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0}
    | {"text_embed_dim": 8, "text_embed_2_dim": 6, "image_embed_dim": 6, "rope_axes_dim": [4, 4, 4]}
)
PATCHES = {"in_channels": 4, "num_layers": 2, "sample_size": 8, "patch_size": 2}
IMAGE, VIDEO = (4, 4, 8), (4, 2, 4, 8)
TINY = {
    "flux": (
        "FluxTransformer2DModel",
        PACKED | {"num_single_layers": 1, "pooled_projection_dim": 6, "axes_dims_rope": [4, 4, 4]},
        IMAGE,
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        PACKED | {"num_single_layers": 1, "timestep_guidance_channels": 16, "axes_dims_rope": [2, 2, 4, 4]},
        IMAGE,
    ),
    "qwen-image": ("QwenImageTransformer2DModel", QWEN, IMAGE),
    "qwen-image-edit": ("QwenImageTransformer2DModel", QWEN | {"zero_cond_t": True}, IMAGE),
    "wan": ("WanTransformer3DModel", WAN, VIDEO),
    "wan-i2v": ("WanTransformer3DModel", WAN | {"in_channels": 12, "image_dim": 8, "added_kv_proj_dim": 48}, VIDEO),
    "wan-begins": ("WanTransformer3DModel", WAN, VIDEO),
    "ltx": ("LTXVideoTransformer3DModel", LTX, VIDEO),
    "ltx-begins": ("LTXVideoTransformer3DModel", LTX, VIDEO),
    "pixart": (
        "PixArtTransformer2DModel",
        HEADS | PATCHES | {"out_channels": 8, "cross_attention_dim": 48, "caption_channels": 8},
        IMAGE,
    ),
    "sd3": (
        "SD3Transformer2DModel",
        HEADS
        | PATCHES
        | {"out_channels": 4, "joint_attention_dim": 8, "caption_projection_dim": 48, "pooled_projection_dim": 6}
        | {"pos_embed_max_size": 8, "dual_attention_layers": [0], "qk_norm": "rms_norm"},
        IMAGE,
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
        | {"time_embed_dim": 8, "text_embed_dim": 8, "sample_width": 8, "sample_height": 4, "sample_frames": 5}
        | {"max_text_seq_length": UNEVEN, "use_rotary_positional_embeddings": True},
        VIDEO,
    ),
    "hunyuan-1.5": ("HunyuanVideo15Transformer3DModel", HUNYUAN, VIDEO),
    "hunyuan-1.5-begins": ("HunyuanVideo15Transformer3DModel", HUNYUAN, VIDEO),
    "sana": (
        "SanaTransformer2DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 2}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24}
        | {"caption_channels": 8, "sample_size": 8, "patch_size": 1},
        (4, 8, 6),
    ),
    "dit": ("DiTTransformer2DModel", HEADS | PATCHES | {"out_channels": 8, "num_embeds_ada_norm": 10}, (4, 8, 8)),
}
WAYS = {
    "recomputed": {"checkpointed_blocks": "all"},
    "selective": {"checkpointed_blocks": "all", "checkpointing": "selective"},
    "ring": {"cp_ring": 2, "checkpointed_blocks": "all", "checkpointing": "selective"},
    "segments": {"checkpointed_segments": {"blocks": 2}},
    "offload": {"offload_activations": True},
    "accumulated": {"micro_batch_size": 1, "grad_accum_steps": 2},
    "clipped": {"gradient_clipping": 0.05},
    "hsdp": {"dp_replicate": 2},
    "replicas": {"dp_replicate": 4},
    "in_backward": {"optimizer_in_backward": True},
    "lora": {"lora": LoraSpec(rank=2, base="int8")},
    "zero2": {"engine": "deepspeed", "ds_config": {"zero_optimization": {"stage": 2}}},
    "zero3": {"engine": "deepspeed", "ds_config": {"zero_optimization": {"stage": 3}}},
    "compiled": {"compile_blocks": True, "checkpointed_blocks": "all"},
    "tensorwise": {"precision": "bf16", "float8": "tensorwise"},
    "rowwise": {"precision": "bf16", "float8": "rowwise"},
    "compiled ring": {"cp_ring": 2, "compile_blocks": True, "checkpointed_blocks": "all"},
}
FOUR = ("accumulated", "clipped", "hsdp", "replicas", "zero2")
"""Settings in which it counts that several groups of processes share samples."""
SAME = ("lora", "gradient_clipping", "precision", "float8")
"""Settings that change the numbers of one process, too."""
ONE_BLOCK = {"num_layers": 1}
"""For compiled models: a second block's graph would take each process as long again."""


def spec_of(name: str, changed: dict[str, int]) -> ModelSpec:
    class_name, kwargs, _ = TINY[name]
    return ModelSpec(name=name, class_name=class_name, kwargs=kwargs | changed)


def strategy(cp: int, processes: int = 4, **given: object) -> Strategy:
    """For one process, or for several."""
    world = {"engine": "fsdp2", "world_size": processes, "cp": cp} if cp > 1 else {}
    usual = {"precision": "fp32", "micro_batch_size": SAMPLES * cp // processes if cp > 1 else SAMPLES}
    # Adam makes a full step of any gradient, even of a key's bias, which is rounding alone. A large eps prevents it.
    usual |= {"optimizer": OptimizerSpec(lr=1e-3, eps=1e-3), "gradient_clipping": None}
    return Strategy(**usual | world | given)


def batches(name: str, step: int, chosen: Strategy, world: World, extras: dict[str, models.Extra]) -> list[Batch]:
    """This process's micro-batches of that step's global batch. Captions have different lengths."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(step))
    whole = CONTEXTS[TINY[name][0]].text is not None
    text = (512 if name == "wan-i2v" else UNEVEN if whole else TEXT[0], TEXT[1])
    lengths = torch.tensor([text[0], 3, 5, 6])
    latents, embeds = draw(SAMPLES, *TINY[name][2]), draw(SAMPLES, *text)
    mask = (torch.arange(text[0]) < lengths[:, None]).float()
    more = {}
    for key, each in extras.items():
        shape = each.sample_shape(TINY[name][2])
        if each.fill and len(shape) == 1:
            more[key] = (torch.arange(min(*shape, UNEVEN)) < lengths[:, None]).float()
        else:
            more[key] = draw(SAMPLES, *((min(shape[0], UNEVEN), shape[1]) if len(shape) == 2 else shape))
    more |= {"class_label": torch.arange(SAMPLES)} if name == "dit" else {}
    more |= {"reference": draw(SAMPLES, 1, *TINY[name][2])} if name.endswith("edit") else {}
    world = world.of_samples(chosen.cp)
    size, found = chosen.micro_batch_size, []
    for i in range(chosen.grad_accum_steps):
        first = (i * world.world_size + world.rank) * size
        mine = slice(first, first + size)
        seeds = tuple(range(100 * step, 100 * step + SAMPLES))[mine]
        of_mine = {key: value[mine] for key, value in more.items()}
        found.append(Batch(latents[mine], embeds[mine], mask[mine], seeds, of_mine))
    return found


class Run:
    """A model with random weights, trained by a strategy."""

    def __init__(self, name: str, chosen: Strategy, world: World, changed: dict[str, int]) -> None:
        self.name, self.strategy, self.world = name, chosen, world
        self.family = models.family(TINY[name][0])
        model = models.build(spec_of(name, changed), device="cpu", dtype=engines.compute_dtype(chosen), seed=0)
        generator = torch.Generator().manual_seed(1)
        for param in model.parameters():  # initial zeros would hide what depends on what
            param.data.normal_(std=0.1, generator=generator)
        self.extras = self.family.extras(model) | (self.family.first(model) if name.endswith("begins") else {})
        models.equip(model, self.family, chosen, backend="aot_eager")
        self.engine = engines.create(chosen, model, self.family, device=torch.device("cpu"))

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss and each gradient of the first step, by torch alone."""
        given, loss = batches(self.name, 0, self.strategy, self.world, self.extras), torch.zeros(())
        for batch in given:
            t = torch.linspace(0.1, 0.9, SAMPLES)[[seed % 100 for seed in batch.seeds]]
            predicted = self.family.predict(self.engine.model, batch.latents, t, batch)
            one = (predicted[:, :4] - batch.latents).square().mean()  # the rest is a variance
            self.engine.backward(one, last=batch is given[-1])
            loss += one.detach() / len(given)
        # Zeros are a gradient too: compiled blocks have them where others have none.
        found = {
            name: torch.zeros(param.shape) if param.grad is None else whole(param.grad).clone()
            for name, param in self.engine.model.named_parameters()
            if param.requires_grad
        }
        self.engine.model.zero_grad()
        return mean(loss, self.world), found

    def trained(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """The loss of each step, and the weights after them."""
        losses = []
        for step in range(STEPS):
            given = batches(self.name, step, self.strategy, self.world, self.extras)
            loss = train_step(self.engine, self.family, FlowMatchingSpec(), given, lr=1e-3).loss
            losses.append(mean(loss, self.world))
        return losses, self._weights()

    def _weights(self) -> dict[str, torch.Tensor]:
        """All weights, on each process: each holds pieces."""
        mine = {
            name: (piece.offset, piece.numel, piece.tensor)
            for name, piece in state_slices(self.engine, None, self.world.rank).items()
            if name.startswith("master.")
        }
        every = [mine] * self.world.world_size
        if self.world.world_size > 1:
            dist.all_gather_object(every, mine)
        found: dict[str, torch.Tensor] = {}
        for pieces in every:
            for name, (offset, numel, tensor) in pieces.items():
                found.setdefault(name, torch.full((numel,), torch.nan))[offset : offset + len(tensor)] = tensor
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean(loss: torch.Tensor, world: World) -> float:
    loss = loss.clone()
    if world.world_size > 1:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return float(loss)


Answer = tuple[float, dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]


def answer(name: str, chosen: Strategy, world: World, **changed: int) -> Answer:
    """Loss and gradients of a step, then losses and weights of several. `changed`: arguments of the model."""
    run = Run(name, chosen, world, changed)
    kept = chosen.engine != "deepspeed" and not chosen.optimizer_in_backward and chosen.precision == "fp32"
    return *(run.gradients() if kept else (0.0, {})), *run.trained()


def compared(alone: Answer, shared: Answer) -> dict[str, float]:
    """The largest differences of losses and gradients, as shares; a gradient's of its own largest value. A gradient
    that is only rounding, such as that of a key's bias, is compared with the largest of all."""
    (loss, gradients, curve, weights), (other, others, curves, others_weights) = alone, shared
    assert gradients.keys() == others.keys() or not others
    assert weights.keys() == others_weights.keys()
    least = max((float(each.abs().max()) for each in gradients.values()), default=0.0) * 1e-3
    return {
        "loss": abs(loss - other) / loss if others else 0.0,
        "gradients": max((_off(gradients[key], each, least) for key, each in others.items()), default=0.0),
        "curve": max(abs(a - b) / a for a, b in zip(curve, curves, strict=True)),
        "weights": max(float((each - others_weights[key]).abs().max()) for key, each in weights.items()),
    }


def _off(one: torch.Tensor, other: torch.Tensor, least: float) -> float:
    return float((one - other).abs().max() / one.abs().max().clamp(min=least))


def degrees(name: str) -> dict[str, Strategy]:
    """A family's ways to share samples, by the suffix of its name."""
    if NAMED:
        found = {str(PROCESSES): strategy(PROCESSES, PROCESSES)}
        return found | ({"4 rings": strategy(4, cp_ring=2)} if PROCESSES == 4 else {})
    found = {"2": strategy(2), "4": strategy(4)}
    if name != "sana":
        found |= {"2 ring": strategy(2, cp_ring=2), "4 ring": strategy(4, cp_ring=4), "4 rings": strategy(4, cp_ring=2)}
    if name != "dit":
        found["compiled"] = strategy(4, compile_blocks=True)
    return found


def families(world: World, names: Iterable[str]) -> dict[str, dict[str, float]]:
    found = {}
    for name in names:
        shared = {key: answer(name, chosen, world) for key, chosen in degrees(name).items()}
        if world.is_main:
            alone = answer(name, strategy(1), World())
            found |= {f"{name} {cp}": compared(alone, each) for cp, each in shared.items()}
    return found


def ways(world: World) -> dict[str, dict[str, float]]:
    found, alone = {}, {}
    for name, way in WAYS.items():
        if NAMED and (name in FOUR) != (world.world_size == 4):
            continue
        blocks = ONE_BLOCK if "compile_blocks" in way else {}
        shared = answer("qwen-image", strategy(2, world.world_size, **way), world, **blocks)
        same = {key: way[key] for key in SAME if key in way}
        if world.is_main:
            key = str(same | blocks)
            alone[key] = alone.get(key) or answer("qwen-image", strategy(1, **same), World(), **blocks)
            found[name] = compared(alone[key], shared)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = world_from_env()
    assert {TINY[name][0] for name in TINY} == set(CONTEXTS)
    found = families(world, NAMED or TINY) | ways(world)
    if world.is_main:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
