"""Hostile parts are refused in one line. The background writer loses nothing and hides no error."""

import hashlib
import json
import threading
import time

import pytest
import torch
from disks import mounted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from stores import Caption, make_store

from bigdit.errors import UserError
from bigdit.store.files import READERS
from bigdit.store.header import LONGEST_HEADER, read_header
from bigdit.store.part import WAITING_PARTS, EncodedRange, PartWriter, part_path, write_part
from bigdit.store.reader import Part
from bigdit.store.text import Text


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "streams"])
def whole(request, tmp_path_factory):
    """The bytes of a sound part, and its path."""
    root = tmp_path_factory.mktemp("sound")
    make_store(root, 8, pooled=True, eight_bits=True, streams=request.param)
    file = part_path(root, 0, 8)
    return file.read_bytes(), file


def split(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def refused(file, data):
    """The line that refuses a file with these bytes."""
    file.write_bytes(data)
    with pytest.raises(UserError) as error:
        Part.open(file)
    (line,) = error.value.problems
    assert "\n" not in line
    assert len(line) < 500
    assert line.startswith(f"data.features: {file} ")
    return line


def changed(whole, name, **values):
    header, body = split(whole)
    header[name] |= values
    return joined(header, body)


def test_headers_of_malice_are_refused_in_one_line(whole, tmp_path):
    data, _ = whole
    file = tmp_path / "part-000000000000-000000000008.safetensors"
    header, body = split(data)
    name, other = "latent/4x6x6", "latent/4x4x8"
    (begin, end), nbytes = header[name]["data_offsets"], len(body)
    huge = (1 << 64) - 1
    assert "has a damaged header: 18446744073709551615 bytes long" in refused(file, b"\xff" * 8 + data[8:])
    assert "bytes long; the limit is" in refused(file, (LONGEST_HEADER + 1).to_bytes(8, "little") + data[8:])
    assert "is truncated" in refused(file, (len(data)).to_bytes(8, "little") + data[8:])
    assert "is truncated" in refused(file, b"")
    for bad in (b"{", b"\xff\xfe", b"[1]", b"null", b'"x"', b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000):
        assert "has a damaged header" in refused(file, joined(bad, body))
    lines = [
        changed(data, name, data_offsets=[begin + 1, end + 1]),
        changed(data, name, data_offsets=header[other]["data_offsets"]),
        changed(data, name, data_offsets=[nbytes, nbytes + end - begin]),
        changed(data, name, data_offsets=[begin, huge]),
        changed(data, name, data_offsets=[-8, end]),
        changed(data, name, data_offsets=[end, begin]),
        changed(data, name, data_offsets=[begin]),
        changed(data, name, data_offsets=[float(begin), float(end)]),
        changed(data, name, data_offsets=[True, end]),
        changed(data, name, data_offsets="ab"),
        changed(data, name, shape=[1 << 40, 1 << 40, 4, 6, 6]),
        changed(data, name, shape=[0, huge, 6, 6]),
        changed(data, name, shape=[1] * 100_000),
        changed(data, name, shape=[-1, -5, 4, 6, 6]),
        changed(data, name, dtype="F64"),
        changed(data, name, dtype=["BF16"]),
        changed(data, "digests", dtype="F32", shape=[6]),
        changed(data, "text", dtype="U8"),
        changed(data, "pooled", shape=[1, header["pooled"]["shape"][0] * header["pooled"]["shape"][1]]),
        changed(data, "__metadata__", skipped=3),
        joined({**header, "stream/more": header["caption"]}, body),
        joined({**header, "stream/../more": header["caption"]}, body),
        joined({**header, "row/4x6x6": 7}, body),
        joined({**header, "latent/1x99999999999x2": header[name]}, body),
        joined({**header, "row/../../etc": header["row/4x6x6"]}, body),
        joined(data[8 : len(data) - nbytes].rstrip().replace(b"{", b'{"text":{},', 1), body),
        *(joined({key: entry for key, entry in header.items() if key != gone}, body) for gone in header),
    ]
    for line in lines:
        assert any(why in refused(file, line) for why in ("damaged header", "is another part", "is too long"))


def test_tables_of_malice_are_refused_though_their_digests_are_right(whole, tmp_path):
    data, source = whole
    file = tmp_path / source.name
    columns = read_header(source).columns

    def forged(name, row, column, value):
        from bigdit.store.tensors import chained_digest

        forged = bytearray(data)
        at = columns[name].offset + row * columns[name].row_bytes + 8 * column
        forged[at : at + 8] = value.to_bytes(8, "little", signed=True)
        names = [
            "content",
            "caption",
            *(each for kind in ("row/", "stream/") for each in sorted(columns) if each.startswith(kind)),
        ]
        tables = [bytes(forged[columns[each].offset :][: columns[each].nbytes]) for each in names]
        at = columns["digests"].offset + 8
        forged[at : at + 8] = chained_digest(tables).to_bytes(8, "little", signed=True)
        return bytes(forged)

    most = (1 << 63) - 1
    wrong = {"caption": {0: (-1, most), 1: (-1, most, most - 4), 2: (0, 0x7FC00000, 0x80000001)}}
    if "stream/layers" in columns:
        wrong["caption"][4] = (-1, most, 13)
        wrong["stream/layers"] = {0: (-1, most), 1: (-1, most, most - 4, 1), 2: (-1, most, 4)}
    for name, column, value in [(n, c, v) for n, columns in wrong.items() for c, vs in columns.items() for v in vs]:
        assert "is damaged in caption 1: its place" in refused(file, forged(name, 1, column, value))
    for column, values in {0: (-1, 8, most), 1: (-1, most, 9), 2: (0, -1, most, most - 1)}.items():
        for value in values:
            line = refused(file, forged("row/4x6x6", 1, column, value))
            assert "is damaged in row 1 of 4x6x6: its values are out of range" in line


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_change_of_bytes_goes_unnoticed_or_is_a_bug(whole, tmp_path, changes, cut):
    data, _ = whole
    file = tmp_path / "part-000000000000-000000000008.safetensors"
    changed = bytearray(data)
    for at, value in changes:
        changed[at % len(data)] = value
    if cut:
        changed = changed[: changes[0][0] % len(data)]
    file.write_bytes(changed)
    try:
        found = list(Part.open(file).damages())
    except UserError:
        return
    assert bool(found) == (bytes(changed) != data)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_too_short_for_a_read_is_an_error(tmp_path, reader):
    (tmp_path / "file").write_bytes(b"12345678")
    file = READERS[reader](tmp_path / "file")
    memory = bytearray(4)
    file.read_into(memoryview(memory), 4)
    assert memory == b"5678"
    with pytest.raises(UserError, match="ends at byte 8, before its data does"):
        file.read_into(memoryview(memory), 6)


def encoded(start, tokens=4):
    texts = {"a": Text(torch.randn(tokens, 8))}
    return EncodedRange({(4, 2, 2): torch.randn(1, 4, 2, 2)}, {(4, 2, 2): [start]}, {start: (Caption("a"),)}, texts, [])


def test_the_writer_commits_in_the_background_and_the_same_bytes(tmp_path):
    reported, whole = [], [encoded(i) for i in range(5)]
    with PartWriter() as writer:
        for i, each in enumerate(whole):
            path = part_path(tmp_path / "background", i, i + 1)
            writer.write(
                path, each, "x", committed=lambda seconds, i=i: reported.append((i, threading.current_thread().name))
            )
    assert reported == [(i, "writer_0") for i in range(5)]
    for i, each in enumerate(whole):
        path = part_path(tmp_path / "plain", i, i + 1)
        write_part(path, each, identity="x")
        assert path.read_bytes() == part_path(tmp_path / "background", i, i + 1).read_bytes()
        assert "latent/4x2x2" in load_file(path)


def test_an_encoder_waits_for_no_more_than_the_parts_that_may_wait(tmp_path):
    go = threading.Event()
    with PartWriter() as writer:
        began = time.perf_counter()
        for i in range(WAITING_PARTS):
            writer.write(part_path(tmp_path, i, i + 1), encoded(i), "x", committed=lambda seconds: go.wait())
        assert time.perf_counter() - began < 5
        more = threading.Thread(target=writer.write, args=(part_path(tmp_path, 9, 10), encoded(9), "x"))
        more.start()
        more.join(0.5)
        assert more.is_alive()  # the queue is bounded
        go.set()
        more.join(20)
        assert not more.is_alive()
    assert len(list(tmp_path.iterdir())) == WAITING_PARTS + 1


def write_all(paths, tokens=4, pause=0.0):
    with PartWriter() as writer:
        for number, path in enumerate(paths):
            writer.write(path, encoded(number, tokens), "x")
            time.sleep(pause)


@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_an_error_of_the_disk_comes_out_and_nothing_after_it_is_written(tmp_path, pause):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="cannot write"):
        write_all([part_path(tmp_path / "file", 0, 1), part_path(tmp_path, 1, 2)], pause=pause)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    with mounted(tmp_path / "small", "size=256k") as small:
        with pytest.raises(UserError, match=r"cannot write .*: No space left on device, .* free$"):
            write_all([part_path(small, i, i + 1) for i in range(20)], tokens=4000)
        for file in small.iterdir():
            assert list(Part.open(file).damages()) == []
        assert 0 < len(list(small.iterdir())) < 20


def test_the_bytes_of_a_part_stay_those_of_its_version(tmp_path):
    """The same extraction makes a store again to the byte. Other bytes need a new version of the schema."""
    states = torch.arange(40).view(5, 8) / 8
    texts = {"a": Text(states, states[0, :3]), "b": Text(states[:2] + 1, states[1, :3])}
    shape, captions = (4, 2, 2), {0: (Caption("a"), Caption("b", 2.0)), 1: (Caption("a"),)}
    latents = torch.arange(32, dtype=torch.bfloat16).view(2, *shape)
    found = {}
    for eight_bits in (False, True):
        path = part_path(tmp_path, 0, 2)
        encoded = EncodedRange({shape: latents}, {shape: [0, 1]}, captions, texts, [])
        write_part(path, encoded, identity="x", eight_bits=eight_bits)
        found[eight_bits] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert found == {False: "08d5b021e9cd8d5e", True: "2c35c40c1d9926de"}
