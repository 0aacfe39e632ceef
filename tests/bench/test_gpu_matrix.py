"""Steps of a real H100, which was measured once: today's rehearsals of the same points against what it took."""

import statistics

import pytest
from on_gpu.page import measured
from on_gpu.points import POINTS
from on_gpu.predicted import rehearsed

from bigdit.rehearse import rehearse
from bigdit.units import MIB

PAGE = 2 * MIB  # what an allocator with expandable segments takes at a time
ASKED = (
    "hunyuandit-v1.2 (2 blocks)",
    "sd3-medium (2 blocks)",
    "flux.2-klein-4b (2 blocks)",
    "sana-1600m-1024 (2 blocks)",
)
# Of Sana's, the points that one process trains on features, in formats that need no other library.
LEFT_OUT = ("online", "zero", "fp16", "default allocator")


@pytest.mark.xdist_group("referee")
def test_rehearsals_of_today_come_to_what_an_h100_took():
    wanted = [p for p in POINTS if p.name.startswith(ASKED) and not any(word in p.name for word in LEFT_OUT)]
    taken = {each.name: each for each in measured()}
    offs = {}
    for point in wanted:
        request, gpu = point.question()
        phases = rehearsed(rehearse(request).sizes[0].timeline, point, gpu)
        assert [each.phase for each in phases] == [each.phase for each in taken[point.name].phases]
        ours, theirs = (max(each.reserved for each in side) for side in (phases, taken[point.name].phases))
        offs[point.name] = ours - theirs
    assert len(offs) == 5
    # The card had torch 2.11: its blocks are a little smaller or larger than those of this torch.
    assert max(map(abs, offs.values())) <= PAGE, offs
    assert statistics.median(offs.values()) == 0, offs
