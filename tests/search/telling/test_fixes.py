"""What would fit where nothing that was asked for does: what of it ran, and what is predicted."""

import plans
import pytest
from bigdit.rehearse.pool import Pool
from bigdit.search.predict.anchors import Sample

from bigdit.memory.process import ByteRange
from bigdit.profile.cards import Cards
from bigdit.search.asking.ask import question_for
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.explore import Hopes
from bigdit.search.telling.fixes import fixes
from bigdit.speed.interval import Interval
from bigdit.units import GIB


def fixed_step(card):
    """A second on any card but an H200, which takes half of that."""
    seconds = Interval(low=0.5, high=0.5) if card.name == "h200-sxm" else Interval(low=1, high=1)
    return plans.made_plan().chosen.step.model_copy(update={"seconds": seconds})


@pytest.fixture
def grown(monkeypatch):
    """The rows for a machine that is larger, when no other strategy is found: of a choice that was tried on a card."""
    monkeypatch.setattr("bigdit.search.telling.fixes.hopeful", lambda *asked: Hopes([], [], []))
    monkeypatch.setattr("bigdit.search.telling.fixes.explore", lambda pool, sample, proposed: ((), ()))

    def of(gpu, high, host, **asked):
        question = question_for(model="sana-1600m", gpu=gpu, full=True, **asked)
        taken = {"process": ByteRange(low_bytes=high, high_bytes=high), "host_bytes": host, "verdict": "DOES NOT FIT"}
        smallest = plans.made_plan().chosen.model_copy(
            update={**taken, "ran": True, "confirmed": False, "headroom_bytes": question.gpu.usable_bytes - high}
        )
        sample = Sample(question.model, question.gpu, question.resolution, question.frames)
        return fixes(None, sample, question, Evidence(), smallest, fixed_step)

    return of


def test_on_a_larger_card_nothing_ran(grown):
    (row,) = grown("rtx-3060-12g", 20 * GIB, GIB, host_memory="64GiB")
    assert (row.verdict, row.reason) == ("FITS", "a larger card")
    assert row.predicted
    assert row.headroom_bytes >= GIB  # 5 % of what is wanted, for an architecture that may take more


def test_a_larger_card_is_named_though_the_host_is_short_too(grown):
    (row,) = grown("t4", 100 * GIB, 108 * GIB, host_memory="64GiB")
    assert row.title.endswith("on NVIDIA H200")
    assert (row.verdict, row.reason) == (
        "FITS",
        "a larger card, and 108.00 GiB of host RAM a machine, instead of 64.00 GiB",
    )


def test_a_larger_card_computes_the_precision_and_goes_at_its_own_speed(grown):
    """Of 32 GB a V100 would be the smallest, which computes no bf16."""
    (row,) = grown("rtx-4090", 30 * GIB, GIB)
    assert row.strategy.precision == "bf16"
    assert row.title.endswith("on NVIDIA A100-PCIE-40GB")
    (fast,) = grown("t4", 100 * GIB, GIB)
    samples = fast.strategy.micro_batch_size * fast.strategy.grad_accum_steps
    assert fast.samples_per_second_per_card == Interval(low=2 * samples, high=2 * samples)


def test_with_more_host_memory_the_card_s_figures_stand(grown):
    (row,) = grown("a40", 20 * GIB, 100 * GIB, host_memory="64GiB")
    assert (row.verdict, row.reason) == ("FITS", "100.00 GiB of host RAM a machine, instead of 64.00 GiB")
    assert not row.predicted


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_ways_out_on_the_same_kind_of_card_ran_there():
    """Each in so many bytes; what is for another card did not."""
    question = question_for(model="dit-s-8", gpu="rtx-3060-12g", reserve=0)
    gpu = question.gpu.model_copy(update={"usable_mib": 1500})
    question = question.model_copy(update={"gpu": gpu, "host_memory_bytes": 64 * GIB})
    sample = Sample(question.model, gpu, question.resolution, question.frames)
    taken = {"process": ByteRange(low_bytes=2 * GIB, high_bytes=2 * GIB)}
    smallest = plans.made_plan().chosen.model_copy(update=taken | {"host_bytes": GIB})
    with Pool() as pool, Cards(gpu) as cards:
        *here, larger = fixes(pool, sample, question, Evidence(), smallest, fixed_step, cards)
    assert not cards.unanswered
    assert [row.reason for row in here] == [
        "2 cards instead of 1",
        "adapters beside frozen weights: another training",
    ]
    assert all(row.ran and row.verdict == "FITS" and row.headroom_bytes >= 0 for row in here)
    assert not larger.ran
