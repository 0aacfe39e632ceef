"""Rounds of benchmarks/faults.py, fewer of them: nothing is lost, nothing is half there, every byte is right."""

import pytest
from faulty.case import make_case
from faulty.damage import can_mount, cut_rounds, flip_rounds, full_disk_round
from faulty.kills import kill_all_round, kill_round
from faulty.shared import clock_round, hung_round, two_at_once_round, vanished_round

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("faults") / "case")


@pytest.mark.slow
def test_killed_workers_lose_nothing(case):
    kills = sum(sum(kill_round(case, seed)[0].values()) for seed in range(5))
    assert kills >= 5


@pytest.mark.slow
def test_killed_extractions_go_on(case):
    assert kill_all_round(case, 1, kills=1) == 2


@pytest.mark.slow
def test_two_extractions_share_the_work(case):
    twice = two_at_once_round(case, "two")
    # Of 20 units those that the one had in hand when the other had nothing else left: one that is encoded and one that
    # is written, of each.
    assert twice <= 4


@pytest.mark.slow
def test_a_hung_extraction_that_goes_on_does_no_harm(case):
    hung_round(case, 0)


def test_clocks_that_jump_do_no_harm(case):
    clock_round(case, 0)


def test_what_a_vanished_machine_left_is_worked_around(case):
    vanished_round(case, 0)


def test_every_flipped_bit_is_found(case):
    found = flip_rounds(case, 0, 200)
    assert (found.made, found.verified) == (200, 200)
    assert found.read + found.unread == 200
    assert found.unread < 40  # captions as text, which training does not read


def test_every_cut_file_is_found(case):
    found = cut_rounds(case, 0, 60)
    assert (found.made, found.verified, found.read) == (60, 60, 60)


def test_a_full_disk_ends_in_one_line_and_goes_on_with_room(case):
    if can_mount(case.folder / "mount"):
        assert full_disk_round(case, 0).endswith("No space left on device")
    else:  # another test limits the size of files, which takes no right to mount
        assert not (case.folder / "full-0").exists()
