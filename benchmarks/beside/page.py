"""The part of peers.md that has both sides of each row."""

from __future__ import annotations

from typing import Any

from beside.counted import WARM
from beside.measured import OURS, STEPS

HEAD = f"""## bigdit beside them

Made by `python benchmarks/peers.py --beside`; beside/rows.json has the commands. Both sides train the same model, with
the same adapters, optimizer, recomputation, resolution and card, under `bigdit emulate` with torch's default allocator:
bf16, gradients clipped at 1, weights empty, one sample a step. In GiB, what torch has allocated before the first step,
and allocated and reserved in steps, at most. Counted are steps {WARM + 1} to {STEPS}, and their mean is shown: kernels
launched by name; calls of cuBLAS, cuBLASLt and cuDNN, which launch theirs; copies to the card, to the host and on the
card; how often the host waits for the card. Largest: the samples of a step that fit where one more runs out of memory;
–: not looked for.

| row | side | before | allocated | reserved | kernels | calls | copies to / from / on | waits | largest |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def part(document: dict[str, Any], found: dict[str, Any]) -> str:
    """The table, and what differs."""
    lines = [
        _line(row, way, found[row["id"]][way])
        for row in document["rows"]
        for way in (OURS, *row["theirs"])
        if way in found.get(row["id"], {})
    ]
    return "\n".join([HEAD, *lines, "", NOTES])


def _line(row: dict[str, Any], way: str, side: dict[str, Any]) -> str:
    name = "bigdit" if way == OURS else f"{row['project']}: `{row['script']}`, {way}"
    if "failed" in side:
        return f"| {row['id']} | {name} | {side['failed']} | | | | | | | |"
    memory = [f"{side[key]:.2f}" for key in ("before_gib", "allocated_gib", "reserved_gib")]
    copies = " / ".join(f"{side['copies'].get(way, 0):g}" for way in ("to device", "to host", "on device"))
    counts = [f"{side['kernels']:g}", f"{side['library_calls']:g}", copies, f"{side['waits']:g}"]
    largest = f"{side['largest']}; then it fails" if "why" in side else str(side.get("largest", "–"))
    return f"| {' | '.join([row['id'], name, *memory, *counts, largest])} |"


NOTES = """What differs between the sides:

- Numerics. The scripts compute under autocast. Those of LoRA keep adapters and AdamW's moments in bf16, where an update
  below half a step of bf16 is lost; bigdit has fp32 masters and moments of them. The full fine-tuning has fp32 weights
  there, which autocast casts anew in each pass and each recomputation, fp32 gradients, and AdamW's temporaries of all
  parameters at once; bigdit has bf16 weights and gradients beside fp32 masters, and a fused AdamW that has none.
- What is in the step. bigdit's features were made before. A script with one prompt encodes that once. Those of SD3
  encode each step's pictures, by 152 of the kernels and 31 of the calls: `--cache_latents` fails there (for LoRA it
  hands bf16 pixels to a VAE in fp32), or is not there. Sana's keeps Gemma on the card, which its pipeline still holds;
  with a caption a picture it encodes captions and pictures in each step.
- Sana's script fails at two samples of one prompt, whose embedding has no batch; with a caption a picture it does not.
- finetrainers keeps adapters in fp32, as bigdit keeps their masters, and runs them so: each of its 190 casts what comes
  in and what goes out, forward and again when its block is recomputed. bigdit runs them in bf16. Its features are made
  before, as bigdit's are, by the same command. Of its 44 copies on the card 39 are gradients of slices that diffusers
  0.33.1 cuts: two of each attention of two streams, and one behind the last block. 0.42.1, which bigdit trains, splits
  in attention, and slices at the end of each single-stream block.
- Waits. A script waits for each tensor that it sends from memory that is not pinned, twice a sample where it looks up
  the sample's noise level, and for the loss. bigdit waits once, to know whether the step is taken (docs/errors.md), and
  once in ten steps for their losses and norms.
- Copies. One of bigdit's on the card is of the loss, whose own storage has the latents' size; to the host go the
  verdict, the loss and the norm, and no step waits for the last two. The others are of both sides: 47 of SD3's are
  gradients of what each attention slices in two, within diffusers' processor, and 20 of Sana's are made in the backward
  pass of convolutions.
- The largest batch of the full fine-tuning: at 18 samples the script runs out in its VAE, which encodes pictures in
  fp32 beside weights and AdamW's state, and asks for 9 GiB at once.

- Before the first step bigdit has more on the card than the script in two rows. Of SD3 in full 11.49 GiB against 10.77:
  its 2.03 billion weights are there in bf16 and as fp32 masters, 6 bytes each, 11.33 GiB, and the script's in fp32
  alone, 4 bytes, 7.56; what the script's other 3.2 GiB are was not broken down. In steps it is the other way round,
  since bigdit's gradients are in bf16. Of Flux.1, 22.281 against 22.272: adapters in bf16 beside their fp32 masters.
- SimpleTuner has a row above and none here: bigdit was not run beside it, and how the two compare is not known.

What the comparison changed in bigdit: the step of one process multiplied and rounded each parameter by itself, and now
does so by lists, as the scripts do (Sana: 2661 kernels became 2183); each micro-batch waited for its t, and each loss
and norm of ten steps was waited for (4.0 waits became 1.1). FLUX.1's single-stream blocks return slices of one tensor,
whose 75 gradients were each copied into zeros and then added: 38 kernels join them now, for every model whose blocks
return such slices, and no number changes. Gradients of adapters are widened by lists of up to 2 MiB (Flux: 8175 kernels
became 7759; Sana: 2183, 1947; SD3: 2810, 2432); of the recipes with adapters one reserves 2 MiB more by it, and two 2
MiB less. Those of whole models still are one by one: by lists of 16 MiB, in chunks of 240 instead of 256, SD3's full
fine-tuning launched 208 kernels fewer, and reserved 0.12 GiB more. What forward passes still wait for is in diffusers'
models: numbers and tables that they make on the host (Lumina, Chroma, Qwen-Image, HiDream; CogView4 four times a
block), and what they pick by a mask's values (Lumina, Z-Image, HunyuanImage).

## What could not be run

- finetrainers after 3c583bf, the last commit before 8222d3f (April 2025): from there on `attention_dispatch.py:72`
  imports `_AttentionOp` from `torch.distributed.tensor.experimental._attention`, where torch 2.11 and later, the ones
  that are emulated, no longer have it. At 3c583bf `data/dataset.py:1030` names
  `torchvision.io.video_reader.VideoReader` in a signature, which torchvision 0.26, that of torch 2.11, has no more: the
  module was taken from torchvision 0.25 into 0.28, with those that it imports. torch 2.10, whose that is, is a build
  for CUDA 12.8 and ends with `cudaGetDeviceProperties_v2 has no answer without a GPU`. The script is as it stands, with
  diffusers 0.33.1, transformers 4.52.4, peft 0.15.2, accelerate 1.7.0 and datasets 3.6.0;
  `--float32_matmul_precision` has to be given, since the `highest` that its docstring names as default is not set.
- NVlabs/Sana: `pyproject.toml` (09cf0ce) pins torchvision 0.23.0, which is for torch 2.8, and with it xformers
  0.0.32.post2, flash_attn 2.8.3 and triton 3.4.0, all of them built for CUDA 12: not emulated. Its repository of 1.0 GB
  could not be brought to the machine of these figures either.
- SimpleTuner (bc8e6ab, Python 3.12) on Sana: its text is encoded by a SanaPipeline that `helpers/models/common.py:4050`
  makes without a scheduler. `helpers/models/sana/model.py:85` says that this pipeline has one of its own, and
  `common.py:3798`, which is to load that, is nowhere written over and gives none; so it would end on a card as well.
  SD3.5 has no such claim, and is the row above. What `setup.py` asks for does not go together: with transformers 5.24.0
  `mageflow/vendor/models/modules/text_encoder.py:23`, which every start imports, finds no
  `Qwen3VLCausalLMOutputWithPast`; with 5.6.0 transformers' own `hub_kernels.py:89` fails with kernels 0.16; 5.14.1 is
  the one that was taken."""
