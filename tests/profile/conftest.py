"""One pair of emulated GPUs for all tests of this folder; each file begins with an empty cache."""

from collections.abc import Iterator

import pytest
from gpus import A40

from bigdit.profile.gpus import EmulatedGpus


@pytest.fixture(scope="session")
def gpus() -> Iterator[EmulatedGpus]:
    with EmulatedGpus(A40, 2) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def _own_cache(own_cache: None) -> None:
    pass
