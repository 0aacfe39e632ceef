"""Extraction with a GPU: libraries initialise CUDA when imported, and CUDA does not survive a fork."""

from commands import DIGITS
from gpus import on_gpu
from PIL import Image

from bigdit.store import FeatureStore

# An emulated GPU holds the values of small tensors.
SMALL = "encoders.text.config={d_model: 32, d_kv: 8, d_ff: 64, num_layers: 1, num_heads: 4}"


def test_workers_encode_on_the_gpu(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(6):
        Image.new("L", (128, 128), 40 * number).save(tmp_path / "images" / f"{number}.png")
        (tmp_path / "images" / f"{number}.txt").write_text(f"number {number}")
    overrides = [
        *(f"data.images={tmp_path / 'images'}", f"data.features={tmp_path / 'features'}", "data.part_size=4"),
        *("data.workers=2", "data.buckets=[[128, 128]]", "encoders.device=cuda", SMALL),
        "model.kwargs.caption_channels=32",
    ]
    settings = [part for override in overrides for part in ("--set", override)]
    done = on_gpu(
        "a40",
        f"""
        from bigdit.cli import main
        if __name__ == "__main__":
            main(["extract", "--config", {str(DIGITS)!r}, *{settings!r}])
        """,
        gpus=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 images encoded" in done.stderr + done.stdout
    assert "cuda" in (tmp_path / "features" / "report.json").read_text()

    assert len(FeatureStore.open(tmp_path / "features").buckets) == 1
