"""The check for torch's warning about views under FSDP2 finds who writes into one."""

import types

import torch
from torch import nn
from views import written_views


class Written(nn.Module):
    """Its part returns a view, and it adds to that, in place or not."""

    def __init__(self, in_place):
        super().__init__()
        self.part, self.in_place = nn.Sequential(nn.Linear(4, 4), nn.Flatten()), in_place

    def forward(self, x):
        hidden = self.part(x)
        if self.in_place:
            hidden += 1
        return (hidden + 1).view(-1)


def test_a_view_that_is_written_into_is_named():
    for in_place, named in ((True, ["Sequential"]), (False, [])):
        model = Written(in_place)
        family = types.SimpleNamespace(shared=lambda model: [model.part], blocks=lambda model: [])
        x = torch.randn(2, 2, 4)
        assert written_views(family, model, lambda: model(x)) == named  # noqa: B023
