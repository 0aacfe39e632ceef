"""WebDataset tars as sources: honest ones are read at offsets, hostile and damaged ones refused in one line."""

import contextlib
import io
import os
import pickle
import tarfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_sources import opened, png, reason, texts, value, write_tar

from bigdit.config.data import DataConfig
from bigdit.errors import UserError
from bigdit.sources.open import open_source
from bigdit.sources.protocol import Unusable


def member(name, kind, **fields):
    """A member of a type that data sets do not use."""
    found = tarfile.TarInfo(name)
    found.type = kind
    for field, content in fields.items():
        setattr(found, field, content)
    return found, None


def samples(numbers):
    """An image and a caption for each number."""
    return [
        pair for number in numbers for pair in ((f"{number:04d}.png", png(number)), (f"{number:04d}.txt", b"a caption"))
    ]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_read_at_their_offsets(tmp_path, tar_format):
    long = "a/" + "long" * 30 + "/x" if tar_format != tarfile.USTAR_FORMAT else "a/x"
    files = [
        member("./", tarfile.DIRTYPE),
        ("./000.png", png(7)),
        ("./000.txt", b"a caption"),
        ("./000.json", b'{"captions": ["one", "two"], "weights": [1, 3]}'),
        ("./000.cls", b"5"),
        ("./000.seg.png", b"a mask, no image of the sample"),
        (f"{long}.TXT", b"of a long name"),
        (f"{long}.caption", b"less than a text"),
        (f"{long}.PNG", png(8)),
        ("README", b"no sample"),
        ("no-caption.png", png(9)),
        ("no-image.txt", b"a caption"),
        ("two.png", png(1)),
        ("two.jpg", png(2)),
        ("own.png", png(4)),
        ("own.caption", b"of its own"),
        ("damaged.png", png(3)[:30]),
        ("damaged.txt", b"a caption"),
    ]
    write_tar(tmp_path / "a.tar", files, tar_format)
    items = opened(str(tmp_path / "a.tar"), tmp_path / "f").items(0, 99)
    assert [item.name for item in items] == [
        f"a.tar/{name}" for name in ("000", long, "no-caption", "no-image", "two", "own", "damaged")
    ]
    items = pickle.loads(pickle.dumps(items))  # as they are sent to a worker
    assert texts(items[0]) == [("one", 1), ("two", 3)]
    assert texts(items[1]) == [("of a long name", 1)]
    assert [value(item.load()) for item in items[:2]] == [7, 8]
    assert reason(items[2]) == "caption no-caption.txt is missing"
    assert reason(items[3]) == "sample of 0 images among txt, not of one"
    assert reason(items[4]) == "sample of 2 images among png, jpg, not of one"
    assert texts(items[5]) == [("of its own", 1)]
    assert reason(items[6]).startswith("damaged image: ")


def test_captions_after_the_whole_name_of_an_image_are_read(tmp_path):
    files = [
        ("a.png", png(1)),
        ("a.png.txt", b"after the whole name"),
        ("b.JPG", png(2)),
        ("b.jpg.caption", b"another suffix"),
        ("c.png", png(3)),
        ("c.png.txt", b"less than a text"),
        ("c.txt", b"the usual name"),
        ("d.png", png(4)),
        ("d.png.json", b'{"caption": "in JSON"}'),
    ]
    write_tar(tmp_path / "a.tar", files)
    items = opened(str(tmp_path / "a.tar"), tmp_path / "f").items(0, 9)
    found = [texts(item)[0][0] for item in items]
    assert found == ["after the whole name", "another suffix", "the usual name", "in JSON"]


def test_nothing_is_written_next_to_the_tars_and_pickles_are_never_read(tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    write_tar(tmp_path / "tars/a.tar", [*samples([1]), ("0002.pyd", pickle.dumps(Harm())), ("0002.png", png())])
    source = opened(str(tmp_path / "tars"), tmp_path / "f")
    value(source.items(0, 1)[0].load())
    assert reason(source.items(1, 2)[0]) == "caption 0002.txt is missing"
    assert os.listdir(tmp_path / "tars") == ["a.tar"]
    assert not (tmp_path / "harm").exists()


def test_folders_and_patterns_of_tars_and_their_order(tmp_path):
    for number in range(12):
        write_tar(tmp_path / f"tars/{number:02d}.tar", samples(range(number * 10, number * 10 + number)))
    whole = opened(str(tmp_path / "tars"), tmp_path / "f")
    assert len(whole) == sum(range(12))
    expected = [number * 10 + at for number in range(12) for at in range(number)]
    assert [value(item.load()) for item in whole.items(0, len(whole))] == expected
    assert [value(item.load()) for item in whole.items(11, 40)] == expected[11:40]
    assert opened(str(tmp_path / "tars/{00..11}.tar"), tmp_path / "f").identity == whole.identity
    assert opened(str(tmp_path / "tars/*.tar"), tmp_path / "g").identity == whole.identity  # indexed again
    assert len(opened(str(tmp_path / "tars/{03,0[45]}.tar"), tmp_path / "f")) == 12
    with pytest.raises(UserError, match=r"data\.images: .*tars/12\.tar does not exist, of .*\{10\.\.13\}\.tar"):
        opened(str(tmp_path / "tars/{10..13}.tar"), tmp_path / "f")
    with pytest.raises(UserError, match=r"names 10000000000 files; the limits are 1 and 1000000"):
        opened(str(tmp_path / "tars/{0..9999999999}.tar"), tmp_path / "f")


def test_indices_are_made_once_and_again_for_a_tar_that_changed(tmp_path):
    tar = write_tar(tmp_path / "a.tar", samples(range(3)))
    first = opened(str(tar), tmp_path / "f")
    (index,) = (tmp_path / "f/index").glob("*.parquet")
    made = index.stat().st_mtime_ns
    assert opened(str(tar), tmp_path / "f").identity == first.identity
    assert index.stat().st_mtime_ns == made
    whole = index.read_bytes()
    for changed in (b"damaged", b"", *(whole[:at] + b"\xff" + whole[at + 1 :] for at in range(0, len(whole), 60))):
        index.write_bytes(changed)
        again = opened(str(tar), tmp_path / "f")
        assert again.identity == first.identity
        assert [item.load().captions for item in again.items(0, 3)] == [
            item.load().captions for item in first.items(0, 3)
        ]
    write_tar(tar, samples(range(4)))
    assert len(opened(str(tar), tmp_path / "f")) == 4


@pytest.mark.slow
def test_indexing_in_processes_gives_the_same(tmp_path):
    for number in range(16):
        write_tar(tmp_path / f"tars/{number:02d}.tar", samples(range(number + 1)))
    write_tar(tmp_path / "bad/15.tar", [("../x.png", png())])

    def in_two(images):
        return open_source(DataConfig(images=images, features=tmp_path / "two", buckets=[(8, 8)], workers=2))

    with pytest.raises(UserError, match=r"bad/15\.tar has the member '\.\./x\.png', whose name leads out of it"):
        in_two([str(tmp_path / "tars"), str(tmp_path / "{tars,bad}/15.tar")])
    one = opened(str(tmp_path / "tars"), tmp_path / "one")
    assert in_two(str(tmp_path / "tars")).identity == one.identity


HOSTILE = {
    "absolute": ([("/etc/passwd.png", b"x")], r"has the member '/etc/passwd\.png', whose name leads out of it"),
    "climbing": ([("a/../../b.png", b"x")], r"has the member 'a/\.\./\.\./b\.png', whose name leads out of it"),
    "symlink": (
        [member("a.png", tarfile.SYMTYPE, linkname="/etc/shadow")],
        r"has the member 'a\.png', a link to '/etc/shadow'",
    ),
    "hard link": ([member("a.png", tarfile.LNKTYPE, linkname="b.png")], r"has the member 'a\.png', a link to 'b\.png'"),
    "device": ([member("a.png", tarfile.CHRTYPE)], r"has the member 'a\.png', a device or an unknown type"),
    "pipe": ([member("a.png", tarfile.FIFOTYPE)], r"has the member 'a\.png', a device or an unknown type"),
    "unknown": ([member("a.png", b"V")], r"has the member 'a\.png', a device or an unknown type"),
    "newline": ([("/a\nb.png", b"x")], r"has the member '/a\\nb\.png'"),
    "bomb": ([member("a.png", tarfile.REGTYPE, size=2**50)], r"is cut: 'a\.png' of 1125899906842624 bytes goes beyond"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_refused_in_one_line(tmp_path, case):
    files, problem = HOSTILE[case]
    tar = write_tar(tmp_path / "a.tar", [*samples([1]), *files, *samples([2])])
    refused(tar, problem)


def refused(tar, problem):
    """The tar is refused, in one line and in bounded memory, and leaves no index."""
    features = tar.parent / "f"
    with pytest.raises(UserError, match=rf"^data\.images: {tar} {problem}") as error:
        opened(str(tar), features)
    (line,) = error.value.problems
    assert "\n" not in line
    assert len(line) < 500
    assert not list(features.glob("**/*.parquet*"))
    assert not list(features.glob("**/.tmp*"))


def header(name, kind, size, **fields):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for field, content in fields.items():
        setattr(info, field, content)
    return info.tobuf(tarfile.GNU_FORMAT)


def test_headers_that_would_fill_the_memory_are_refused(tmp_path):
    tar = tmp_path / "a.tar"
    for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
        with tar.open("wb") as file:
            file.write(header("a.png", kind, 2**40))
            file.truncate(2**41)  # sparse on the disk: it takes one block
        refused(tar, "has a member whose headers take more than 65536 bytes")
    with tar.open("wb") as file:  # headers of headers of headers
        for _ in range(5_000):
            file.write(header("a.png", tarfile.GNUTYPE_LONGNAME, 1) + b"x" + bytes(511))
    refused(tar, r"(has a member whose headers take more than 65536 bytes|is damaged or cut: )")


def test_sparse_members_and_negative_sizes_are_refused(tmp_path):
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.png"}
    found = tarfile.TarInfo("a.png")
    found.pax_headers = {**sparse, "GNU.sparse.realsize": str(2**40)}
    found.size = 512
    tar = tmp_path / "a.tar"
    with tarfile.open(tar, "w") as archive:
        archive.addfile(found, io.BytesIO(b"1\n0\n512\n".ljust(512, b"\0")))
    refused(tar, r"has the member 'a\.png', a sparse file")
    for size in (-1, -512, -(2**40)):
        tar.write_bytes(header("a.png", tarfile.REGTYPE, size) + bytes(1024))
        refused(tar, r"(is cut|is damaged|has )")
        tar.write_bytes(header("a.png", tarfile.XHDTYPE, size) + bytes(1024))
        refused(tar, r"(is cut|is damaged|has )")


def test_large_members_are_skipped_by_name_and_never_read(tmp_path):
    tar = tmp_path / "a.tar"
    with tar.open("wb") as file:
        file.write(header("a.png", tarfile.REGTYPE, 2**40))
        file.seek(2**40, os.SEEK_CUR)
        file.write(header("a.txt", tarfile.REGTYPE, 2**30))
        file.seek(2**30, os.SEEK_CUR)
        file.write(header("b.png", tarfile.REGTYPE, 2**40))
        file.seek(2**40, os.SEEK_CUR)
        file.write(header("b.txt", tarfile.REGTYPE, 9) + b"a caption" + bytes(503 + 1024))
    first, second = opened(str(tar), tmp_path / "f").items(0, 2)
    assert reason(first) == "a.txt has 1073741824 bytes; the limit is 1048576"
    assert reason(second) == "image has 1099511627776 bytes; the limit is 1073741824"


def test_cut_joined_and_compressed_tars_are_refused(tmp_path):
    whole = write_tar(tmp_path / "whole.tar", samples(range(4))).read_bytes()
    tar = tmp_path / "a.tar"
    ends = whole.rstrip(b"\0")
    for cut in (0, 100, 512, 600, len(ends) // 2, len(ends)):
        tar.write_bytes(whole[:cut])
        refused(tar, r"(is empty|is cut|is damaged or cut)")
    tar.write_bytes(whole + whole)
    refused(tar, r"has data after the mark of its end at byte \d+; tars cannot be joined by cat")
    damaged = bytearray(whole)
    damaged[512 * (len(samples([1])) * 2 + 0) + 10] ^= 1  # a header in the middle
    tar.write_bytes(damaged)
    refused(tar, r"has a damaged header at byte \d+")
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    refused(tmp_path / "b.tar.gz", "is compressed, so members cannot be read at offsets; decompress it")


def test_a_tar_that_is_cut_after_it_was_indexed_stops_the_run(tmp_path):
    tar = write_tar(tmp_path / "a.tar", samples(range(4)))
    items = opened(str(tar), tmp_path / "f").items(0, 4)
    os.truncate(tar, 3000)
    with pytest.raises(UserError, match=r"a\.tar ends before byte \d+; it was longer when it was listed"):
        items[3].load()
    tar.unlink()
    with pytest.raises(UserError, match=r"data\.images: .*a\.tar cannot be read: No such file"):
        items[0].load()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from(["flip", "cut", "fill"]))
def test_damage_anywhere_is_refused_or_leaves_samples_that_load_or_are_skipped(tmp_path, seed, how):
    random = np.random.default_rng(seed)
    data = bytearray(write_tar(tmp_path / "whole.tar", samples(range(3)), tarfile.GNU_FORMAT).read_bytes()[: 512 * 14])
    at = int(random.integers(len(data)))
    if how == "cut":
        del data[at:]
    elif how == "flip":
        data[at] ^= 1 << int(random.integers(8))
    else:
        data[at : at + 40] = random.bytes(len(data[at : at + 40]))
    (tmp_path / "a.tar").write_bytes(data)
    items, problems = [], []
    try:
        items = opened(str(tmp_path / "a.tar"), tmp_path / "f").items(0, 99)
    except UserError as error:
        problems = error.problems
    assert items or len(problems) == 1
    assert not any("\n" in problem for problem in problems)
    for item in items:
        with contextlib.suppress(Unusable):
            assert item.load().image.size == (8, 8)
