"""Interleaved timings are summed up as measured: medians, quartiles, ratios within a round."""

import pytest

from bigdit.bench import MachineLoad, Spread, take_turns


def test_turns_go_to_and_fro_and_ratios_are_of_the_same_round():
    order, seconds = [], {"plain": iter([1.0, 2.0, 4.0]), "own": iter([2.0, 2.0, 2.0])}

    def turn(name):
        order.append(name)
        return next(seconds[name])

    baseline, own = take_turns({name: lambda name=name: turn(name) for name in seconds}, 3)
    assert order == ["plain", "own", "own", "plain", "plain", "own"]
    assert (baseline.name, baseline.rounds, baseline.of_baseline) == ("plain", (1.0, 2.0, 4.0), None)
    assert baseline.seconds == Spread(low=1.5, median=2.0, high=3.0)
    assert own.of_baseline == Spread(low=0.75, median=1.0, high=1.5)


def test_one_value_is_its_own_spread():
    assert Spread.of([4.0]) == Spread(low=4.0, median=4.0, high=4.0)


@pytest.mark.parametrize(("mean", "busy"), [(0.1, False), (0.5, False), (0.6, True)])
def test_a_machine_is_busy_by_its_cores(mean, busy):
    assert MachineLoad(mean=mean, cores=2).busy is busy
    assert MachineLoad.now().cores >= 1
