"""Tests of an xdist_group share a worker, and so what their module makes once, for some in minutes."""

import os

import pytest


@pytest.mark.xdist_group("groups")
def test_groups_are_seen(request: pytest.FixtureRequest) -> None:
    """pytest-xdist reads a group from the end of a test's name, where pytest 9.2 does not let it be written."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    assert alone or request.node.nodeid.endswith("@groups")
