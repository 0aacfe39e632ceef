"""The cards of a run."""

from __future__ import annotations

from bigdit.numbers import Count, Positive
from bigdit.spec import Strict


class Cluster(Strict):
    """The cards of the run: `gpus` of them, `gpus_per_node` in a machine, machines joined by `network_gbs`.

    `network_gbs`: 10⁹ bytes a second that one machine sends, and receives at the same time.
    """

    gpus: Count = 1
    gpus_per_node: Count = 8
    network_gbs: Positive = 12.5

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def processes_per_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)
