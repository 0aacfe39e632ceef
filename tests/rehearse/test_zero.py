"""The proof for ZeRO: a rehearsal of the first of N processes equals the record of N real ones, byte for byte.

On the CPU device and host are the same memory: what is offloaded is proved in one ledger with the rest.
"""

import pytest
from proving import prove
from zero import ENGINES, request_of

from bigdit.memory import ledger

OPTIMIZERS = ("adamw", "adamw_8bit", "came")
CHECKPOINTED = (0, 1, "all")


def _configs():
    """(engine, processes, precision, optimizer, checkpointed blocks, accumulation), on two processes every engine
    with every optimizer and every checkpointing; precision and accumulation by turns. A part of them on four
    processes, a part in fp16, and a part with what does not decay in a group of its own."""
    for i, engine in enumerate(ENGINES):
        for j, optimizer in enumerate(OPTIMIZERS):
            for k, checkpointed in enumerate(CHECKPOINTED):
                yield engine, 2, ("bf16", "fp32")[(i + j + k) % 2], optimizer, checkpointed, 1 + (i + k) % 2
        yield engine, 4, ("fp32", "bf16")[i % 2], OPTIMIZERS[i % 3], CHECKPOINTED[i % 3], 1 + i % 2
    for engine in ("zero0", "zero2", "zero3", "zero2-optimizer"):
        yield engine, 2, "fp16", "adamw", 1, 2
    for i, engine in enumerate(ENGINES):
        yield engine, 2, ("fp32", "bf16")[i % 2], OPTIMIZERS[i % 3], 0, 1 + i % 2, "matrices"


CONFIGS = list(_configs())


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """The record and the rehearsal of each configuration."""
    requests = [request_of(*config) for config in CONFIGS]
    return dict(zip(CONFIGS, prove(tmp_path_factory.mktemp("sharded"), requests, timeout=550), strict=True))


@pytest.mark.slow
@pytest.mark.xdist_group("sharded")  # one worker of pytest's runs all the launches, once
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config)))
def test_the_rehearsal_of_zero_is_the_real_step_to_the_byte(config, proved):
    record, answer = proved[config]
    real = ledger(record, granularity=1)
    for phase in real.phases:
        assert answer.ledger.phase(phase.phase) == phase
    assert answer.ledger == real
