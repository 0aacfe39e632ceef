"""The rehearsal against the CUDA build of torch on emulated cards: the rows that cover each rule once."""

import statistics
from collections.abc import Sequence

import pytest
from cards import empty_cache
from refereed.known import KNOWN
from refereed.report import share
from refereed.rows import PART, Row

from bigdit.bench.against_card import Against
from bigdit.bench.alignment import unmatched
from bigdit.bench.referee import judge

pytestmark = [pytest.mark.xdist_group("referee"), pytest.mark.slow]

WORST_RESERVED, MEDIAN_RESERVED = 0.02, 0.005


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[Row, Against | str]:
    """All rows of the part, by the allocator that plans are for, answered anew: nothing that was kept counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path_factory.mktemp("cache"))))
        return dict(judge(PART, expandable_segments=True))


@pytest.mark.parametrize("row", PART, ids=lambda row: row.name.replace(" · ", " "))
def test_what_is_allocated_is_equal_to_the_byte(judged: dict[Row, Against | str], row: Row) -> None:
    found = judged[row]
    assert isinstance(found, Against), found
    for at, phase in enumerate(found.phases):
        if phase.allocated_difference:
            operators = {each.operator for each in found.differences if each.span == at and each.at_peak}
            unknown = operators - KNOWN.keys()
            assert operators, f"{phase} differs, and nothing that was live at its peak does"
            assert not unknown, f"{phase} differs by {unknown}"
        assert share(phase, "reserved") <= WORST_RESERVED, phase


def test_what_is_reserved_is_near(judged: dict[Row, Against | str]) -> None:
    shares = [
        share(phase, "reserved") for found in judged.values() if isinstance(found, Against) for phase in found.phases
    ]
    assert statistics.median(shares) <= MEDIAN_RESERVED


def test_the_allocator_is_torchs_own(judged: dict[Row, Against | str]) -> None:
    others = [row.name for row, found in judged.items() if isinstance(found, Against) and not found.allocator_exact]
    assert not others


@pytest.mark.parametrize(
    ("left", "right", "only"),
    [
        ([], [], ([], [])),
        ([1, 2, 3], [1, 2, 3], ([], [])),
        ([1, 2, 3], [], ([0, 1, 2], [])),
        ([], [5], ([], [0])),
        ([1, 2, 3, 4], [1, 3, 4], ([1], [])),
        ([1, 3, 4], [1, 2, 3, 4], ([], [1])),
        ([7, 7, 8], [7, 8, 8], ([1], [2])),
        ([1, 2], [3, 4], ([0, 1], [0, 1])),
    ],
)
def test_an_alignment_finds_what_one_side_alone_has(
    left: Sequence[int], right: Sequence[int], only: tuple[list[int], list[int]]
) -> None:
    found = unmatched(left, right)
    for ours, theirs in zip(found, only, strict=True):
        assert len(ours) == len(theirs)
    assert [value for i, value in enumerate(left) if i not in found[0]] == [
        value for i, value in enumerate(right) if i not in found[1]
    ]
