"""Several clips of a video: together they are the video, frame by frame, and none is decoded from the video's start."""

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_sources import texts, write_tar
from tiny_videos import SHADES, video

from bigdit.config.data import DataConfig
from bigdit.errors import UserError
from bigdit.sources import videos
from bigdit.sources.open import open_source
from bigdit.sources.protocol import Unusable
from bigdit.sources.videos import Clip, resampled

RATE, LENGTH = 16, 160  # ten seconds


def opened(images, frames=5, fps=8):
    return open_source(DataConfig(images=images, features="features", buckets=[(frames, 16, 16)], fps=fps))


def shades(item):
    """The number of each frame of a clip."""
    return [round(np.asarray(frame.convert("L")).mean() / SHADES) for frame in item.load().image]


def filmed(path, codec, **options):
    """A video whose frames all differ. Only a few can be decoded without those before them."""
    rng = np.random.default_rng(0)
    ground = Image.fromarray(rng.integers(0, 256, (6, 10, 3), np.uint8)).resize((64, 200), Image.Resampling.BICUBIC)
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=RATE, options=options)
        stream.width, stream.height = 64, 32
        stream.gop_size = 12
        for number in range(LENGTH):
            image = ground.crop((0, number, 64, number + 32))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())


CODECS = {
    "a.mp4": ("libx264", {"bf": "3", "x264-params": "open-gop=1:scenecut=0"}),
    "b.mkv": ("libx264", {"bf": "3", "x264-params": "open-gop=1:scenecut=0"}),
    "c.webm": ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    "d.mov": ("mpeg4", {"bf": "2"}),
    "e.avi": ("mpeg4", {}),
}


@pytest.mark.parametrize("name", CODECS)
def test_clips_are_the_video_and_none_is_decoded_from_its_start(tmp_path, name, monkeypatch):
    codec, options = CODECS[name]
    filmed(tmp_path / name, codec, **options)
    decoded = []
    timed = videos._timed

    def counted(*given):
        for each in timed(*given):
            decoded.append(each[0])
            yield each

    monkeypatch.setattr(videos, "_timed", counted)
    for fps in (RATE, 7.5):
        whole = [np.asarray(each) for each in videos.video_frames(tmp_path / name, Clip(fps, LENGTH))]
        assert len(whole) == pytest.approx(LENGTH * fps / RATE, abs=1)
        for start in range(0, LENGTH + 9, 9):
            decoded.clear()
            found = [np.asarray(each) for each in videos.video_frames(tmp_path / name, Clip(fps, 9, start))]
            wanted = whole[start : start + 9]
            assert len(found) == len(wanted), start
            assert all(map(np.array_equal, found, wanted)), start
            assert len(decoded) < 64  # a group of images, a second, the clip


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 9), st.integers(0, 40))
def test_a_later_clip_is_a_part_of_the_whole(lasting, fps, start):
    timed = [(sum(lasting[:number]) + 3, length, number) for number, length in enumerate(lasting)]
    whole = list(resampled(timed, Clip(fps, 10**6)))
    assert list(resampled(timed, Clip(fps, 7, start))) == whole[start : start + 7]
    shown = [place for place, (time, _, _) in enumerate(timed) if time - 3 <= start / fps]
    assert list(resampled(timed[shown[-1] :], Clip(fps, 7, start), began=3)) == whole[start : start + 7]


def test_a_source_has_so_many_clips_of_each_video_in_its_order(tmp_path):
    video(tmp_path / "a.mp4", range(0, 15000, 1000), caption="a ship")
    video(tmp_path / "b.mp4", range(0, 4000, 1000), caption="a boat")
    asked = {"path": str(tmp_path), "clips": 3}
    source, alone = opened(asked, fps=1), opened(str(tmp_path), fps=1)
    assert (len(source), len(alone)) == (6, 2)
    items = source.items(1, 5)
    assert [(item.index, item.name) for item in items] == [
        *((1, "a.mp4 from 5 s"), (2, "a.mp4 from 10 s"), (3, "b.mp4 from 0 s"), (4, "b.mp4 from 5 s")),
    ]
    assert [shades(item) for item in items[:3]] == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [0, 1, 2, 3]]
    with pytest.raises(Unusable, match=r"^the video ends before this clip$"):
        shades(items[3])
    assert {text for item in items[:2] for text in texts(item)} == {("a ship", 1)}
    others = opened(asked | {"clips": 2}, fps=1), alone
    assert len({each.identity["digest"] for each in (source, *others)}) == 3
    assert opened(asked | {"clips": 1}, fps=1).identity == alone.identity


def test_sources_of_all_kinds_have_clips_and_a_image_has_one(tmp_path):
    frames = [Image.new("RGB", (16, 16), (number * SHADES,) * 3) for number in range(9)]
    for folder in ("moving", "frames/a"):
        (tmp_path / folder).mkdir(parents=True)
    for number, frame in enumerate(frames):
        frame.save(tmp_path / f"frames/a/{number}.png")
    (tmp_path / "frames/a.txt").write_text("a caption")
    frames[0].save(tmp_path / "moving/a.webp", save_all=True, append_images=frames[1:], duration=125, lossless=True)
    frames[5].save(tmp_path / "moving/b.png")
    for name in ("a.txt", "b.txt"):
        (tmp_path / "moving" / name).write_text("a caption")
    (tmp_path / "table.csv").write_text("path,caption\nmoving/a.webp,a ship\n")
    video(tmp_path / "c.mp4", range(0, 9 * 125, 125), caption=None)
    write_tar(tmp_path / "d.tar", [("d.mp4", (tmp_path / "c.mp4").read_bytes()), ("d.txt", b"a ship")])
    for path, more in (("moving", {}), ("frames", {"frame_rate": 8}), ("table.csv", {}), ("d.tar", {})):
        asked = {"path": str(tmp_path / path), "clips": 2} | more
        data = DataConfig(images=asked, features=str(tmp_path / "features"), buckets=[(4, 16, 16)], fps=8)
        assert [shades(item) for item in open_source(data).items(0, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]], path
    still = opened({"path": str(tmp_path / "moving"), "clips": 2}).items(2, 4)
    assert isinstance(still[0].load().image, Image.Image)
    with pytest.raises(Unusable, match=r"^an image has one clip only$"):
        still[1].load()
    with pytest.raises(UserError) as refused:
        open_source(DataConfig(images={"path": str(tmp_path), "clips": 2}, features="f", buckets=[(8, 8)]))
    assert str(refused.value) == "data.images.clips is for videos, and data.buckets has no frames; leave it out"
