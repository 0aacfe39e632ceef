"""Stores in object storage: the same batches by ranges, a bounded cache, and errors in one line."""

import sys
from contextlib import closing
from pathlib import Path

import obstore
import pytest
import torch
from commands import DIGITS
from obstore.store import LocalStore, MemoryStore, S3Store
from stores import make_store, read_all, read_rows, stream_of

from bigdit.catalog.resolve import model_spec
from bigdit.config.data import DataConfig
from bigdit.config.stages import load_run
from bigdit.errors import UserError
from bigdit.extract.extract import extract
from bigdit.store import FeatureStore, files
from bigdit.store.files import RemoteParts, url_of


@pytest.fixture
def local(tmp_path):
    make_store(tmp_path / "store", 120)
    return FeatureStore.open(tmp_path / "store")


def upload(root, store):
    for file in root.glob("*.*"):
        obstore.put(store, file.name, file.read_bytes())
    return store


def assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert mine.seeds == theirs.seeds
        assert torch.equal(mine.latents, theirs.latents)
        assert torch.equal(mine.text_embeds, theirs.text_embeds)


def test_a_folder_by_its_url_gives_the_same_batches(local):
    found = FeatureStore.open(Path(f"file://{local.root}"))
    assert isinstance(found._files, RemoteParts)
    assert_same(read_all(found, 30), read_all(local, 30))


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_object_stores_give_the_same_batches(local, kind, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    store = upload(local.root, MemoryStore() if kind == "memory" else LocalStore(tmp_path / "other"))
    monkeypatch.setattr("obstore.store.from_url", lambda url: store)
    assert_same(read_all(FeatureStore.open(Path("s3://bucket/features")), 30), read_all(local, 30))


def test_what_workers_have_in_hand_is_no_part_of_a_store(local, monkeypatch):
    file = sorted(local.root.glob("part-*"))[3]
    (local.root / "workers/name").mkdir(parents=True)
    (local.root / "workers/name" / file.name).touch()
    store = upload(local.root, MemoryStore())
    obstore.put(store, f"workers/name/{file.name}", b"")
    monkeypatch.setattr("obstore.store.from_url", lambda url: store)
    assert_same(read_all(FeatureStore.open(Path("s3://bucket/features")), 30), read_all(local, 30))
    monkeypatch.undo()
    by_url = Path(f"file://{local.root}")
    assert_same(read_all(FeatureStore.open(by_url), 30), read_all(local, 30))
    file.unlink()
    with pytest.raises(UserError, match=rf"lacks 1 of 16 files, the first {file.name}"):
        FeatureStore.open(by_url)


@pytest.mark.timeout(120)
def test_s3_gives_the_same_batches(local, monkeypatch):
    """Over HTTP, from moto's S3 server."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        settings = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
        settings |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3", endpoint_url=settings["AWS_ENDPOINT_URL"], region_name="us-east-1").create_bucket(
            Bucket="bucket"
        )
        upload(local.root, S3Store("bucket", prefix="features", client_options={"allow_http": True}))
        assert_same(read_all(FeatureStore.open(Path("s3://bucket/features")), 30), read_all(local, 30))
        with pytest.raises(UserError, match=r"s3://bucket/nothing holds no latents; `bigdit extract"):
            FeatureStore.open(Path("s3://bucket/nothing"))
    finally:
        server.stop()
    with pytest.raises(UserError, match=r"data\.features: s3://bucket/features.* cannot be read: ") as error:
        FeatureStore.open(Path("s3://bucket/features"))
    assert "\n" not in str(error.value)


@pytest.fixture
def bounded(local, monkeypatch):
    """A store of 15 parts whose cache holds three."""
    monkeypatch.setattr(files, "BLOCK", 256)
    store = upload(local.root, MemoryStore())
    monkeypatch.setattr("obstore.store.from_url", lambda url: store)
    limit = 3 * max(int(size) for size in local.index.parts[:, 2])
    return FeatureStore.open(Path("s3://bucket/features"), cache_bytes=limit), limit


def test_the_cache_is_bounded_and_what_it_let_go_of_is_fetched_again(local, bounded):
    found, limit = bounded
    stream = stream_of(found)
    most = 0
    with closing(stream.steps(0, 60)) as steps:
        batches = []
        for (batch,) in steps:
            batches.append(batch)
            most = max(most, sum(file.stat().st_blocks * 512 for file in found.root.glob("part-*")))
    assert_same(batches, read_all(local, 60))
    in_flight = 2 * 4 * 4 * 4096  # for threads and advice; a block on the disk takes a page at least
    assert most <= limit + in_flight
    assert 0 < found._files.held_bytes <= limit + in_flight
    whole = sum(int(size) for size in local.index.parts[:, 2])
    assert whole > 1.5 * limit


def test_ranges_alone_are_fetched(local, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 64)
    store = upload(local.root, MemoryStore())
    monkeypatch.setattr("obstore.store.from_url", lambda url: store)
    found = FeatureStore.open(Path("s3://bucket/features"))
    read_rows(found, (4, 6, 6), [0])
    part = found.part(0)
    wanted = part.latents_span((4, 6, 6), 0)[1] + part.states_span(int(part.rows[4, 6, 6][0, 1]))[1]
    assert wanted <= found._files.held_bytes <= wanted + 8 * 64


def test_the_mirror_is_gone_with_the_store(local, monkeypatch):
    import gc

    store = upload(local.root, MemoryStore())
    monkeypatch.setattr("obstore.store.from_url", lambda url: store)
    found = FeatureStore.open(Path("s3://bucket/features"))
    read_rows(found, (4, 6, 6), [0])
    root = found.root
    assert root.is_dir()
    del found
    gc.collect()
    assert not root.exists()


def test_a_cache_that_is_too_small_is_refused_with_what_it_should_be(local, monkeypatch):
    store = upload(local.root, MemoryStore())
    monkeypatch.setattr("obstore.store.from_url", lambda url: store)
    with pytest.raises(UserError, match=r"data\.remote_cache is 1000 B, and the largest part of s3://bucket/x has"):
        FeatureStore.open(Path("s3://bucket/x"), cache_bytes=1000)


def test_damage_in_a_remote_part_is_found(local, monkeypatch):
    store = upload(local.root, MemoryStore())
    name = next(local.root.glob("part-*")).name
    data = bytearray((local.root / name).read_bytes())
    data[-len(data) // 2] ^= 4
    obstore.put(store, name, bytes(data))
    monkeypatch.setattr("obstore.store.from_url", lambda url: store)
    with pytest.raises(UserError, match=rf"s3:/+bucket/x/{name} is damaged in .*: its digest differs"):
        read_all(FeatureStore.open(Path("s3://bucket/x")), 60)


def test_urls_are_known_behind_paths():
    for url in ("s3://bucket/a/b", "gs://bucket/x", "az://container/x", "file:///srv/features"):
        assert url_of(Path(url)) == url
    assert url_of(Path("/srv/features")) is None
    assert url_of(Path("features")) is None


def test_extraction_into_a_url_is_refused(tmp_path):
    run = load_run(DIGITS, [f"data.images={tmp_path}", "data.features=s3://b/x"])
    with pytest.raises(UserError, match=r"extraction cannot write to s3://b/x; extract into a folder"):
        extract(run, model_spec(run.model))


def test_a_missing_obstore_is_named_with_its_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UserError, match=r"s3://b/x needs obstore; pip install 'bigdit\[remote\]'"):
        FeatureStore.open(Path("s3://b/x"))


def test_the_cache_s_size_is_written_in_units(tmp_path):
    data = {"images": tmp_path, "features": "s3://b/x", "buckets": [(8, 8)]}
    assert DataConfig.model_validate(data | {"remote_cache": "2GiB"}).remote_cache == 2 << 30
    assert url_of(DataConfig.model_validate(data).features) == "s3://b/x"
