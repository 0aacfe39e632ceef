"""An engine after a step, to be saved."""

import pytest
from resuming import started, strategy

from bigdit.dist import World


@pytest.fixture(scope="module")
def engine_and_average():
    engine, ema, step, _ = started(strategy(), World())
    step()
    return engine, ema
