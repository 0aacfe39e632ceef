"""Videos as sources: files, animations and folders of frames, at the requested rate, and what cannot be used."""

import io
import re
import sys
from fractions import Fraction

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_sources import gradient, save, write_tar
from tiny_videos import SHADES, transparent, video

from bigdit.config.data import DataConfig
from bigdit.encoders.latents import bucket_pixels
from bigdit.errors import UserError
from bigdit.sources.open import open_source
from bigdit.sources.protocol import Unusable
from bigdit.sources.videos import Clip, resampled


def opened(images, fps=8, frames=5):
    return open_source(DataConfig(images=images, features="features", buckets=[(frames, 16, 16)], fps=fps))


def shades(source, index=0):
    """The number of each frame in a source's item."""
    return [
        round(np.asarray(frame.convert("L")).mean() / SHADES)
        for frame in source.items(index, index + 1)[0].load().image
    ]


def evenly(count, fps):
    return [round(1000 * number / fps) for number in range(count)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov", "avi"])
def test_frames_are_taken_by_their_times(tmp_path, suffix):
    tick = Fraction(1, 16)
    video(tmp_path / f"a.{suffix}", range(12), tick)
    assert shades(opened(str(tmp_path), fps=8, frames=5)) == [0, 2, 4, 6, 8]
    assert shades(opened(str(tmp_path), fps=16, frames=5)) == [0, 1, 2, 3, 4]
    assert shades(opened(str(tmp_path), fps=8, frames=9)) == [0, 2, 4, 6, 8, 10]  # 3/4 s
    assert opened(str(tmp_path)).items(0, 1)[0].load().captions[0].text == "a caption"


def test_a_rate_that_varies_is_followed(tmp_path):
    video(tmp_path / "a.mkv", [0, 100, 200, 900, 1000, 1100])
    assert shades(opened(str(tmp_path), fps=5, frames=9)) == [0, 2, 2, 2, 2, 4]


def test_times_that_a_file_rounds_take_no_frame_twice(tmp_path):
    video(tmp_path / "a.mkv", evenly(15, 30))  # 0, 33, 67, 100, … ms
    assert shades(opened(str(tmp_path), fps=30, frames=15)) == list(range(15))
    assert shades(opened(str(tmp_path), fps=29.97, frames=5)) == [0, 1, 2, 3, 4]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.integers(1, 9),
    st.fractions(min_value=0, max_value=3, max_denominator=9),
)
def test_what_is_shown_is_what_a_player_would_show(lasting, fps, began):
    """By the definition: at k / fps, the last frame that has begun, until the end."""
    starts = [began + sum(lasting[:number]) for number in range(len(lasting))]
    timed = [
        (start, Fraction(length), number) for number, (start, length) in enumerate(zip(starts, lasting, strict=True))
    ]
    end = sum(lasting)
    times = [Fraction(k, fps) for k in range(end * fps)]
    shown = [max(number for number, start in enumerate(starts) if start - began <= time) for time in times]
    assert list(resampled(iter(timed), Clip(fps, 10**6))) == shown
    assert list(resampled(iter(timed), Clip(fps, 7))) == shown[:7]


def test_no_more_is_decoded_than_the_clip_takes():
    asked = []

    def frames():
        for number in range(100):
            asked.append(number)
            yield Fraction(number, 4), Fraction(1, 4), number

    assert list(resampled(frames(), Clip(2, 3))) == [0, 2, 4]
    assert asked == list(range(6))


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_animations_are_videos_by_the_times_of_their_frames(tmp_path, suffix):
    frames = [Image.new("RGB", (16, 16), (number * SHADES,) * 3) for number in range(4)]
    lasting = [100, 300, 100, 200]  # ms
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:], duration=lasting, **options)
    save(tmp_path / f"b.{suffix}")
    source = opened(str(tmp_path), fps=10, frames=9)
    (tmp_path / "a.txt").write_text("a caption")
    assert shades(source) == [0, 1, 1, 1, 2, 3, 3]
    assert isinstance(source.items(1, 2)[0].load().image, Image.Image)
    images = open_source(DataConfig(images=str(tmp_path), features="f", buckets=[(8, 8)]))
    assert isinstance(images.items(0, 1)[0].load().image, Image.Image)  # without frames in the buckets, the first


def test_folders_of_numbered_images_are_videos(tmp_path):
    for number in range(12):
        path = tmp_path / f"deep/a.b/frame_{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), number * SHADES).save(path)
    (tmp_path / "deep/a.b/notes.txt").touch()
    (tmp_path / "deep/a.b.txt").write_text("a caption")
    asked = {"path": str(tmp_path), "frame_rate": 24}
    source = opened(asked, fps=12, frames=9)
    assert [item.name for item in source.items(0, 9)] == ["deep/a.b"]
    assert shades(source) == [0, 2, 4, 6, 8, 10]
    assert source.items(0, 1)[0].load().captions[0].text == "a caption"
    digests = {source.identity["digest"], opened(asked | {"frame_rate": 12}).identity["digest"]}
    (tmp_path / "deep/a.b/frame_5.png").write_bytes(b"damaged")
    digests.add(opened(asked, fps=12).identity["digest"])
    assert len(digests) == 3
    assert shades(opened(asked, fps=12)) == [0, 2, 4, 6, 8]  # it is not among the chosen ones
    with pytest.raises(Unusable, match="damaged image"):
        shades(opened(asked, fps=24, frames=9))
    with pytest.raises(UserError, match=r"holds no folders of images, as frame_rate needs"):
        opened({"path": str(tmp_path / "deep/a.b"), "frame_rate": 24})


def test_what_stands_next_to_folders_of_frames_is_counted(tmp_path, capfd):
    (tmp_path / "a").mkdir()
    for file in ("a/1.png", "b.png"):
        save(tmp_path / file)
    for file in ("c.mp4", "d.gif", "a/e.mp4", "a.txt"):
        (tmp_path / file).touch()
    (tmp_path / "again").symlink_to("a")
    assert len(opened({"path": str(tmp_path), "frame_rate": 8})) == 1
    head, _, kinds = capfd.readouterr().err.strip().rpartition(": ")
    assert head == f"data.images: other files in {tmp_path} are ignored"
    assert sorted(kinds.split(", ")) == ["1 .gif file", "1 .png file", "1 linked folder", "2 .mp4 files"]


def test_tables_name_videos(tmp_path):
    video(tmp_path / "a.mp4", evenly(8, 8), caption=None)
    (tmp_path / "a.csv").write_text("path,caption\na.mp4,a ship\nb.mp4,none\n")
    source = opened(str(tmp_path / "a.csv"))
    assert shades(source) == [0, 1, 2, 3, 4]
    assert source.items(0, 1)[0].load().captions[0].text == "a ship"
    with pytest.raises(Unusable, match=r"image b\.mp4 is missing"):
        shades(source, 1)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov", "avi", "webm"])
@pytest.mark.parametrize("aspect", [Fraction(2), Fraction(1, 2)])
def test_pixels_that_are_not_square_are_shown_as_players_do(tmp_path, suffix, aspect):
    codec = "libvpx-vp9" if suffix == "webm" else "mpeg4"
    path = tmp_path / f"a.{suffix}"
    video(path, range(12), Fraction(1, 16), codec, aspect=aspect)
    if suffix == "webm":  # PyAV leaves it out: DisplayWidth and DisplayHeight take the place of DefaultDuration
        found = re.compile(rb"\x23\xe3\x83\x84.{4}\xe0\x86(\xb0\x81.\xba\x81.)", re.DOTALL)
        shown = b"\xe0\x8e\\1\x54\xb0\x81" + bytes([int(32 * aspect)]) + b"\x54\xba\x81\x10"
        data, count = found.subn(shown, path.read_bytes())
        assert count == 1
        path.write_bytes(data)
    size = (64, 16) if aspect > 1 else (32, 32)
    write_tar(tmp_path / "tars/a.tar", [(path.name, path.read_bytes()), ("a.txt", b"a caption")])
    (tmp_path / "a.csv").write_text(f"path,caption\n{path.name},a caption\n")
    for images in (str(tmp_path), str(tmp_path / "a.csv"), str(tmp_path / "tars"), {"path": str(tmp_path), "clips": 2}):
        data = DataConfig(images=images, features=tmp_path / "f", buckets=[(3, 16, 16)], fps=8)
        for item in open_source(data).items(0, 2):
            assert {frame.size for frame in item.load().image} == {size}
    bucket, _ = bucket_pixels(item.load().image, [(3, 16, 32), (3, 8, 32), (3, 16, 16)], "rgb")
    assert bucket == ((3, 8, 32) if aspect > 1 else (3, 16, 16))


TRANSPARENT = [
    ("mov", "prores_ks", "yuva444p10le"),
    ("mov", "png", "rgba"),
    ("mov", "qtrle", "argb"),
    ("webm", "libvpx-vp9", "yuva420p"),
    ("mkv", "libvpx-vp9", "yuva420p"),
    ("webm", "libvpx", "yuva420p"),
    ("mkv", "ffv1", "bgra"),
]


@pytest.mark.parametrize(("suffix", "codec", "pixels"), TRANSPARENT)
def test_transparent_videos_lie_over_white(tmp_path, suffix, codec, pixels):
    transparent(tmp_path / f"a.{suffix}", codec, pixels)
    for item in opened({"path": str(tmp_path), "clips": 2}, frames=4).items(0, 2):
        frames = list(item.load().image)
        assert len(frames) == 4
        for frame in frames:
            assert frame.getpixel((4, 8)) == pytest.approx((255, 0, 0), abs=8)
            assert frame.getpixel((28, 8)) == (255, 255, 255)


def test_transparency_that_cannot_be_decoded_is_reported(tmp_path):
    transparent(tmp_path / "a.mkv", "mpeg4", "yuv420p", {"alpha_mode": "1"})
    with pytest.raises(Unusable, match=r"^video with transparency in mpeg4, which PyAV cannot decode here"):
        shades(opened(str(tmp_path)))


@pytest.mark.parametrize("aspect", [1, 2])
def test_a_video_that_was_filmed_upright_is_upright(tmp_path, aspect):
    with av.open(tmp_path / "a.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = 32, 16
        stream.codec_context.sample_aspect_ratio = aspect
        image = Image.new("RGB", (32, 16))
        image.paste("white", (0, 0, 16, 16))  # the left half, which is at the top after a clockwise turn
        container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    data = (tmp_path / "a.mp4").read_bytes()
    header = data.index(b"tkhd")
    unturned = np.array([1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30], ">i4").tobytes()
    clockwise = np.array([0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30], ">i4").tobytes()
    at = data.index(unturned, header)
    (tmp_path / "a.mp4").write_bytes(data[:at] + clockwise + data[at + len(clockwise) :])
    (tmp_path / "a.txt").write_text("a caption")
    (frame,) = opened(str(tmp_path)).items(0, 1)[0].load().image
    assert frame.size == (16, 32 * aspect)
    above, below = np.asarray(frame.convert("L")).reshape(2, -1).mean(1)
    assert above > 200 > 50 > below


def test_what_is_no_video_or_damaged_is_unusable_with_its_reason(tmp_path):
    video(tmp_path / "a.mp4", evenly(8, 8))
    whole = (tmp_path / "a.mp4").read_bytes()
    source = opened(str(tmp_path))
    for damaged in (b"", b"no video", whole[: len(whole) // 2]):
        (tmp_path / "a.mp4").write_bytes(damaged)
        with pytest.raises(Unusable, match=r"^damaged video: "):
            shades(source)
    with av.open(tmp_path / "a.mp4", "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(Unusable, match=r"^file without a video stream$"):
        shades(source)
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(Unusable, match=r"^a\.mp4 is missing$"):
        shades(source)
    (tmp_path / "a.mp4").symlink_to("/dev/zero")
    with pytest.raises(Unusable, match=r"a link out of its folder"):
        shades(source)


def test_a_file_cut_short_gives_the_frames_that_it_has(tmp_path):
    video(tmp_path / "a.mkv", evenly(8, 8))
    data = (tmp_path / "a.mkv").read_bytes()
    (tmp_path / "a.mkv").write_bytes(data[: len(data) * 2 // 3])
    found = shades(opened(str(tmp_path), frames=9))
    assert found == list(range(len(found)))
    assert 0 < len(found) < 8


def test_a_video_names_no_other_file(tmp_path):
    """FFmpeg reads lists of other files and of addresses, whatever their names."""
    for folder in ("secret", "clips"):
        (tmp_path / folder).mkdir()
    video(tmp_path / "secret/b.mp4", evenly(8, 8))
    (tmp_path / "clips/a.mp4").write_text(f"ffconcat version 1.0\nfile {tmp_path / 'secret/b.mp4'}\n")
    (tmp_path / "clips/a.txt").write_text("a caption")
    (tmp_path / "clips/b.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path / 'secret/b.mp4'}\n#EXT-X-ENDLIST\n")
    (tmp_path / "clips/b.txt").write_text("a caption")
    source = opened(str(tmp_path / "clips"))
    for index in (0, 1):
        with pytest.raises(Unusable, match=r"^damaged video: "):
            shades(source, index)


def test_without_frames_in_the_buckets_videos_are_passed_over(tmp_path, capsys):
    save(tmp_path / "b.png")
    video(tmp_path / "a.mp4", evenly(8, 8))
    asked = {"images": str(tmp_path), "features": "features"}
    assert [item.name for item in open_source(DataConfig(**asked, buckets=[(8, 8)])).items(0, 9)] == ["b.png"]
    assert "are ignored: 1 .mp4 file" in capsys.readouterr().err
    assert [item.name for item in opened(str(tmp_path)).items(0, 9)] == ["a.mp4", "b.png"]


def test_without_pyav_the_line_names_what_brings_it(tmp_path, monkeypatch):
    video(tmp_path / "a.mp4", evenly(8, 8))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"a\.mp4 is a video, and PyAV is missing; pip install 'bigdit\[video\]'"):
        shades(opened(str(tmp_path)))


def test_images_next_to_videos_stay_images(tmp_path):
    save(tmp_path / "a.png", image=gradient(24, 24))
    found = opened(str(tmp_path)).items(0, 1)[0].load().image
    assert np.asarray(found).tolist() == np.asarray(gradient(24, 24)).tolist()


def test_a_rate_of_broadcasts_is_exact():
    assert 1 / Clip(23.976, 1).step == Fraction(24000, 1001)
    assert 1 / Clip(29.97, 1).step == Fraction(30000, 1001)
    assert 1 / Clip(12.5, 1).step == Fraction(25, 2)
    assert 1 / Clip(24, 1).step == 24


def test_bytes_of_an_animation_in_a_table(tmp_path):
    frames = [Image.new("L", (16, 16), number * SHADES) for number in range(4)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "gif", save_all=True, append_images=frames[1:], duration=125)
    pq.write_table(pa.table({"image": [buffer.getvalue()], "caption": ["a ship"]}), tmp_path / "a.parquet")
    assert shades(opened(str(tmp_path / "a.parquet"), fps=4)) == [0, 2]


def test_videos_in_tars_are_those_of_files(tmp_path):
    for name, frames in (("a", 12), ("long", 40)):
        video(tmp_path / f"{name}.mp4", range(frames), Fraction(1, 16))
    animated = io.BytesIO()
    stills = [Image.new("RGB", (16, 16), (number * SHADES,) * 3) for number in range(6)]
    stills[0].save(animated, "WEBP", save_all=True, append_images=stills[1:], duration=125, lossless=True)
    mp4, long = ((tmp_path / f"{name}.mp4").read_bytes() for name in ("a", "long"))
    files = [
        *(("0.mp4", mp4), ("0.jpg", b"an image of it, which is not read"), ("0.txt", b"a caption")),
        *(("1.webp", animated.getvalue()), ("1.txt", b"a caption")),
        *(("2.mp4", long[:200]), ("2.txt", b"a caption")),
        *(("3.mp4", mp4), ("3.mkv", mp4), ("3.txt", b"a caption")),
        *(("4.mp4", long), ("4.txt", b"a caption")),
    ]
    write_tar(tmp_path / "tars/a.tar", files)
    tars = {"images": str(tmp_path / "tars"), "features": tmp_path / "f"}
    source = open_source(DataConfig(**tars, buckets=[(5, 16, 16)], fps=8))
    assert [shades(source, index) for index in (0, 1, 4)] == [[0, 2, 4, 6, 8], [0, 1, 2, 3, 4], [0, 2, 4, 6, 8]]
    with pytest.raises(Unusable, match=r"^damaged video: "):
        shades(source, 2)
    with pytest.raises(Unusable, match=r"^sample of 2 videos among mp4, mkv, txt, not of one$"):
        source.items(3, 4)[0].load()
    images = open_source(DataConfig(**tars, buckets=[(16, 16)]))
    with pytest.raises(Unusable, match=r"^sample of a video, without an image$"):
        images.items(4, 5)[0].load()
