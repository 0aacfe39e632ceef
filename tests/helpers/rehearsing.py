"""What tests of rehearsals share: a small Sana and its sample, and many rehearsals in one process."""

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from commands import HELPERS, run_ranks

from bigdit import libraries
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.spec import BatchShape, ModelSpec

SANA = ModelSpec(
    name="tiny-sana",
    class_name="SanaTransformer2DModel",
    kwargs={
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 12,
        "sample_size": 8,
        "patch_size": 1,
    },
)
# Three blocks; some of its weights have more than 4096 elements, so that bitsandbytes keeps them in 8 bits.
THREE_BLOCKS = ModelSpec(
    name="tiny-sana",
    class_name="SanaTransformer2DModel",
    kwargs={
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_layers": 3,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 32,
        "caption_channels": 12,
        "mlp_ratio": 2.5,
        "sample_size": 8,
        "patch_size": 1,
    },
)
# Its first block's embedder is called from outside the block, too: under FSDP2 a unit gathered for the backward pass.
DIT = ModelSpec(
    name="tiny-dit",
    class_name="DiTTransformer2DModel",
    kwargs={
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 3,
        "num_embeds_ada_norm": 10,
        "sample_size": 8,
        "patch_size": 2,
    },
)
SHAPE = BatchShape(latents=(4, 8, 8), text=(6, 12))


def rehearse_all(folder: Path, requests: Sequence[StepRequest]) -> list[RehearsedSize]:
    """The rehearsal of each request at its first micro-batch size."""
    asked, answered = folder / "requests.json", folder / "answers.json"
    asked.write_text(json.dumps([request.model_dump(mode="json") for request in requests]))
    # one process for all of them: what each leaves behind is small
    done = run_ranks(1, __file__, asked, answered, PYTHONPATH=HELPERS, timeout=550)
    assert done.returncode == 0, done.stderr
    return [RehearsedSize.model_validate(value) for value in json.loads(answered.read_text())]


def _main(asked: Path, answered: Path) -> None:
    gc.disable()
    libraries.prepare()
    from bigdit.rehearse.worker import import_for, rehearse_size  # in this process alone: it makes the fake device

    requests = [StepRequest.model_validate(value) for value in json.loads(asked.read_text())]
    for request in requests:
        import_for(request.model_dump_json())
    answers = [rehearse_size(request, request.micro_batch_sizes[0]).model_dump(mode="json") for request in requests]
    answered.write_text(json.dumps(answers))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # with the fake device registered, an interpreter does not shut down cleanly
