"""The rehearsal against the CUDA build of torch on emulated cards: the rows that cover each rule once."""

import statistics
from collections.abc import Sequence

import pytest
from cards import empty_cache
from refereed.known import KNOWN
from refereed.report import share
from refereed.rows import PART, SD35, Row

from bigdit.bench.against_card import Against
from bigdit.bench.alignment import unmatched
from bigdit.bench.referee import judge

pytestmark = [pytest.mark.xdist_group("referee"), pytest.mark.slow]

WORST_RESERVED, MEDIAN_RESERVED = 0.02, 0.005
SEVERAL_TEXTS = (
    Row("hunyuandit-v1.2", "a40", "single,features=online,micro_batch_size=2,encode_chunk=1", 1),
    Row(SD35, "h100-sxm", "single,features=online", 1),
    Row("kandinsky-5-t2v-lite", "h100-sxm", "single,features=online", 1),
)
"""Text encoders side by side on the card: two texts of a model, three encoders that make one text of it, and a text
with a vector beside a video."""
HIDREAM = Row("hidream-i1", "h200-sxm", "single,features=online", 1)
"""All layers of Llama; the experts of its blocks go by values, so that its encode phase alone is known."""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[Row, Against | str]:
    """All rows of the part, by the allocator that plans are for, answered anew: nothing that was kept counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path_factory.mktemp("cache"))))
        return dict(judge([*PART, *SEVERAL_TEXTS, HIDREAM], expandable_segments=True))


@pytest.mark.parametrize("row", [*PART, *SEVERAL_TEXTS], ids=lambda row: row.name.replace(" · ", " "))
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


def test_what_four_text_encoders_allocate_is_equal_to_the_byte(judged: dict[Row, Against | str]) -> None:
    found = judged[HIDREAM]
    assert isinstance(found, Against), found
    encoding = [phase for phase in found.phases if phase.phase in ("init", "encode")]
    assert [phase.phase for phase in encoding] == ["init", "encode", "encode"]
    assert encoding[1].card_allocated_bytes > encoding[0].card_allocated_bytes
    assert not any(phase.allocated_difference for phase in encoding)


def test_what_is_reserved_is_near(judged: dict[Row, Against | str]) -> None:
    shares = [
        share(phase, "reserved")
        for row, found in judged.items()
        if isinstance(found, Against) and row != HIDREAM
        for phase in found.phases
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
