"""What is kept between runs is found again as it was; of a damaged file nothing is believed, and a line says so."""

import pytest
from traces import timeline

from bigdit import catalog
from bigdit.memory.ledger import ledger
from bigdit.rehearse import cache
from bigdit.rehearse.card import cache as card_cache
from bigdit.profile.measured.run import CardRun
from bigdit.profile.request import StepRequest, RehearsedSize
from bigdit.sealed import write_sealed
from bigdit.spec import BatchShape, ModelSpec, Strategy

TRACE = timeline(1000, 2000, -1)
REQUEST = StepRequest(
    model=ModelSpec(name="any", class_name="Any", kwargs={}),
    batch=BatchShape(latents=(4, 8, 8)),
    strategy=Strategy(),
    micro_batch_sizes=(2,),
)
SIZE = RehearsedSize(
    micro_batch_size=2,
    params=7,
    ledger=ledger(TRACE),
    packed_timeline=TRACE.pack(),
    packed_host_timeline=None,
    versions={},
    notices=(),
    seconds=1.5,
    checkpoint_bytes=14,
)
RUN = CardRun(
    device="a card",
    params=7,
    phases=(),
    packed_timeline=TRACE.pack(),
    segments=(),
    deferred=0,
    alloc_retries=0,
    beside_bytes=None,
    host_peak_bytes=1,
    versions={},
    seconds=1.5,
)


def rehearsals():
    return SIZE, lambda: cache.keep(REQUEST, SIZE), lambda: cache.find(REQUEST, 2)


def cards():
    card = catalog.gpu("a40")
    return RUN, lambda: card_cache.keep(card, REQUEST, "2.11", RUN), lambda: card_cache.find(card, REQUEST, "2.11")


@pytest.mark.parametrize("kind", [rehearsals, cards])
def test_what_is_kept_is_believed_as_it_was_written_alone(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BIGDIT_CACHE", str(tmp_path))
    value, keep, find = kind()
    assert find() is None
    assert capsys.readouterr().err == ""
    keep()
    assert find() == value
    (file,) = tmp_path.rglob("*.json")
    whole = file.read_bytes()
    garbage = whole.replace(TRACE.pack().encode(), b"0" * 40)  # JSON of the right keys
    changes = [garbage, b"", whole[:-1], whole[65:], whole + b" "]
    changes += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 5)]
    for changed in changes:
        file.write_bytes(changed)
        assert find() is None
        assert f"{file} is damaged, and the " in capsys.readouterr().err
    write_sealed(file, '{"of": "another version"}')
    assert find() is None
    keep()
    assert find() == value
