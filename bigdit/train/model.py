"""Whether the run's model can be made, and goes with its encoders and its strategy: known without its weights."""

from __future__ import annotations

from bigdit import models
from bigdit.config import RunConfig, check
from bigdit.errors import UserError
from bigdit.models.arguments import arguments
from bigdit.spec import ModelSpec, Strategy


def check_model(run: RunConfig, spec: ModelSpec, strategy: Strategy) -> None:
    """Raise UserError where the class refuses the arguments, or what it makes of them does not go with the run.

    What the config leaves out is what the class takes for it: its own channels and widths.
    """
    family = models.family(spec.class_name)
    model = models.outline(spec)
    made = spec.model_copy(update={"kwargs": dict(arguments(model))})
    check(run, made)
    channels, predicted = (made.kwargs.get(key) for key in ("in_channels", "out_channels"))
    if isinstance(channels, int) and predicted not in (None, channels, 2 * channels):  # 2: and the variance
        raise UserError(
            f"model.kwargs.out_channels is {predicted}, and in_channels is {channels}: what is predicted has the "
            f"channels of what is fed; set out_channels to {channels}"
        )
    models.equip(model, family, strategy)
