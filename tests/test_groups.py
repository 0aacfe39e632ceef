"""Tests of one xdist_group share a worker, and with it what their module makes once: minutes, for some."""

import os

import pytest


@pytest.mark.xdist_group("groups")
def test_groups_are_seen(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells a group by the end of a test's name, which pytest 9.2 does not let it write."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    assert alone or request.node.nodeid.endswith("@groups")
