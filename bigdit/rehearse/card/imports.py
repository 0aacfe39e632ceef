"""What steps on an emulated card need, imported once for all forks that take them.

For emulated cards alone: a real one does not survive a fork.
"""

from __future__ import annotations

from bigdit import libraries
from bigdit.rehearse.request import RehearsalRequest


def import_all() -> None:
    """Import what all steps need."""
    with libraries.importing(), libraries.models_alone():
        import torch

        import bigdit.rehearse.card.steps  # noqa: F401

    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    torch.cuda.init()  # torch refuses to in a fork, since a real driver would
    torch.cuda._is_in_bad_fork = lambda: False  # there is no driver whose state a fork would break


def import_for_plans() -> None:
    """Import what every plan asks for: the updates that are rounded stochastically, which are torchao's."""
    with libraries.importing(), libraries.uncompiled():
        import torch

        from bigdit import optim
        from bigdit.spec import OptimizerSpec

        optim.build(OptimizerSpec(), [torch.zeros(1)], stochastic_rounding=True)


def import_for(request: RehearsalRequest) -> None:
    """Import what the request's steps need beside that."""
    with libraries.importing(), libraries.uncompiled():
        _import_for(request)


def _import_for(request: RehearsalRequest) -> None:
    import diffusers
    import torch

    from bigdit import optim

    getattr(diffusers, request.model.class_name, None)
    strategy = request.strategy
    # Of one number: it imports the library that has the optimizer.
    optim.build(strategy.optimizer, [torch.zeros(1)], stochastic_rounding=strategy.precision == "bf16_sr")
    if strategy.engine == "deepspeed":
        import bigdit.engines.deepspeed
    if strategy.engine == "fsdp2":
        import bigdit.engines.fsdp2
    if strategy.lora is not None:
        import bigdit.models.lora
    if strategy.features == "online":
        import bigdit.encoders.frozen  # noqa: F401
