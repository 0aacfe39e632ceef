"""A worker encodes the empty caption, once, where its encoders are. A second extraction encodes nothing."""

import pytest
from extracting import configured

from bigdit.encoders.t5 import T5TextEncoder
from bigdit.extract.extract import extract
from bigdit.store.store import NULL_TEXT


def test_the_empty_caption_is_encoded_once(flawed, tmp_path, monkeypatch):
    (flawed / "d.txt").write_text("a gray square")
    asked = configured(flawed, tmp_path / "features", "data.buckets=[[8, 8]]")
    with monkeypatch.context() as here:
        here.setattr(T5TextEncoder, "null", _refuse)  # of this process: workers are others
        extract(*asked, workers=1)
        written = (tmp_path / "features" / NULL_TEXT).read_bytes()
        extract(*asked, workers=1)  # where nothing is left to encode
        (tmp_path / "features" / NULL_TEXT).unlink()
        with pytest.raises(AssertionError, match="by this process"):
            extract(*asked, workers=1)
    extract(*asked, workers=1)
    assert (tmp_path / "features" / NULL_TEXT).read_bytes() == written


def _refuse(encoder):
    raise AssertionError("encoded by this process")
