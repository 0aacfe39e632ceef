"""What a plan's page may be asked further: points of the search's options, in agreement with all else in the plan."""

import pytest
from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.predict.anchors import Sample

from bigdit import catalog
from bigdit.search.answer import make_plan
from bigdit.search.asking.ask import question_for
from bigdit.search.finding.candidates import beside
from bigdit.search.finding.space import proposals
from bigdit.search.finding.verdict import expected
from bigdit.search.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """With that of tests/report/test_whatif.py, which is kept."""
    return make_plan(question_for("sana-1600m", "a40", device="rehearsed"))


def test_every_option_is_there_at_a_whole_grid(plan: Plan) -> None:
    titles = [proposal.title for proposal in proposals(plan.question)[0] if not proposal.last_resort]
    averages = [f"{title}, EMA on the {place}" for place in ("card", "host") for title in titles]
    assert [setting.title for setting in plan.settings] == [*titles, *averages]
    for setting in plan.settings:
        places = [(point.micro_batch_size, point.checkpointed_blocks) for point in setting.points]
        sizes, blocks = ({place[at] for place in places} for at in (0, 1))
        assert places == sorted((size, count) for size in sizes for count in blocks)
        assert {0, 10, 20} <= blocks
        assert 1 in sizes


def test_the_front_is_among_the_points_as_it_was_found(plan: Plan) -> None:
    for choice in plan.front:
        (setting,) = [each for each in plan.settings if each.holds(choice.strategy)]
        size, blocks = choice.strategy.micro_batch_size, choice.strategy.checkpointed_blocks
        found = {(each.micro_batch_size, each.checkpointed_blocks): each for each in setting.points}
        if choice.predicted and (size, blocks) not in found:
            continue
        point = found[size, blocks]
        assert point.found == ("predicted" if choice.predicted else "rehearsed")
        assert point.process == choice.process
        assert point.verdict == choice.verdict
        assert point.samples_per_second_per_card == choice.samples_per_second_per_card
        if choice == plan.chosen:
            assert (point.phase, point.at_peak) == (plan.ledger.deciding.phase, plan.ledger.at_peak)


def test_a_predicted_point_says_what_its_bytes_say(plan: Plan) -> None:
    usable = plan.question.gpu.usable_bytes
    points = [each for setting in plan.settings for each in setting.points if each.found == "predicted"]
    assert {each.verdict for each in points} >= {"FITS", "DOES NOT FIT"}
    for each in points:
        assert each.verdict == expected(each.process, usable)
        assert sum(each.at_peak.values()) <= each.peak_reserved_bytes + len(each.at_peak)
        assert not each.at_peak_rehearsed


@pytest.mark.parametrize("place", ["card", "host"])
def test_an_average_beside_another_optimizer_is_what_its_own_rehearsal_finds(plan: Plan, place: str) -> None:
    """Though only AdamW was rehearsed with one."""
    (setting,) = [each for each in plan.settings if each.title == f"one process, 8-bit AdamW, EMA on the {place}"]
    (point,) = [each for each in setting.points if (each.micro_batch_size, each.checkpointed_blocks) == (2, 20)]
    strategy = setting.strategy.settled(micro_batch_size=2, grad_accum_steps=1, checkpointed_blocks=20)
    with Pool() as pool:
        (found,) = pool.rehearse([Sample(plan.question.model, plan.question.gpu, (1024, 1024)).request(strategy)])
    assert isinstance(found, RehearsedSize)
    known = found.ledger
    assert point.phase == known.deciding.phase
    assert ("EMA" in known.at_peak) is (place == "card")
    for category in {*point.at_peak, *known.at_peak}:
        error = abs(point.at_peak.get(category, 0) - known.at_peak.get(category, 0))
        assert error <= 1e-4 * known.peak_allocated_bytes, category


def test_more_samples_take_more_and_more_recomputed_blocks_less(plan: Plan) -> None:
    """Of what is predicted: what was rehearsed differs from it by what neighbours' differences come to."""
    for setting in plan.settings:
        known = [each for each in setting.points if not each.at_peak_rehearsed]
        of = {(each.micro_batch_size, each.checkpointed_blocks): sum(each.at_peak.values()) for each in known}
        sizes, blocks = (sorted({place[at] for place in of}) for at in (0, 1))
        for count in blocks:
            column = [of[size, count] for size in sizes if (size, count) in of]
            assert column == sorted(column)
        for size in sizes:
            row = [of[size, count] for count in blocks if (size, count) in of]
            assert row == sorted(row, reverse=True)


def test_cards_to_choose_from_are_those_that_a_rehearsal_does_not_tell_apart(plan: Plan) -> None:
    (rooms,) = {setting.rooms for setting in plan.settings}
    assert [room.card for room in rooms] == ["NVIDIA A40", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA RTX A6000"]
    larger = catalog.gpu("rtx-a6000").reserving()
    strategy = plan.chosen.strategy
    assert rooms[2].usable_bytes == larger.usable_bytes
    around = beside(plan.question.model_copy(update={"gpu": larger}), strategy)
    assert {setting.beside for setting in plan.settings} == {around}
    samples = [Sample(plan.question.model, gpu, plan.question.resolution) for gpu in (plan.question.gpu, larger)]
    with Pool() as pool:
        own, other = pool.rehearse([sample.request(strategy) for sample in samples])
    assert own.ledger == other.ledger == plan.ledger
