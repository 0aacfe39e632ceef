"""A block whose compiler fails, in a process of its own. torch 2.13 then leaves its hook in the interpreter: calls
keep their arguments until they return, and tensors live longer."""

import torch
from stepping import one_batch
from tiny_models import SANA

from bigdit import models
from bigdit.errors import UserError
from bigdit.models.equip import compile_blocks, compile_errors


def broken(graph, inputs):
    raise RuntimeError("no compiler\nthat works")


if __name__ == "__main__":
    family = models.family(SANA.class_name)
    model = models.build(SANA, device="cpu", dtype=torch.float32, seed=0)
    compile_blocks(model, family, broken)
    batch = one_batch()
    try:
        with compile_errors():
            family.predict(model, batch.latents, torch.tensor([0.1, 0.6]), batch)
    except UserError as refused:
        print(refused)
