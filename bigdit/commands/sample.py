"""`bigdit sample`: pictures from captions or classes, and a grid of them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from bigdit.commands.options import Json
from bigdit.units import LARGEST

if TYPE_CHECKING:
    from bigdit.objective_spec import SamplerName


def run(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or the output of a run: then its latest.")],
    out: Annotated[Path, typer.Option(help="The folder for the pictures and grid.png.")],
    caption: Annotated[
        list[str],
        typer.Option(
            "--caption", "--label", help="A caption; of a model of classes, one's name or number; repeatable."
        ),
    ] = [],  # noqa: B006
    captions: Annotated[Path | None, typer.Option(help="A text file with a caption, or a class, a line.")] = None,
    size: Annotated[str | None, typer.Option(metavar="HxW", help="Pixels; the run's first bucket if left out.")] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps from noise to picture.")] = 20,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of flow matching euler, heun, dpmsolver++ or unipc, of DDPM dpmsolver++, unipc or ddim; the first of "
            "these if left out.",
        ),
    ] = None,
    guidance: Annotated[float, typer.Option(min=0, help="Classifier-free guidance; 1 is none.")] = 3.0,
    negative: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What guidance leads away from; no caption, or no class, if left out."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST, help="Picture i is drawn from seed + i.")] = 0,
    ema: Annotated[bool, typer.Option("--ema", help="The moving average of the weights (train.ema).")] = False,
    as_json: Json = False,
) -> None:
    """Draw one picture a caption, or a class, with a trained checkpoint."""
    from bigdit.errors import UserError

    wanted = [*caption, *_lines(captions)]
    if not wanted:
        raise UserError("no caption was given; pass --caption TEXT, --label CLASS, or --captions FILE with one a line")
    height_width = _size(size) if size else None
    drawn_by = _sampler(sampler)
    if not math.isfinite(guidance):
        raise UserError(f"--guidance is {guidance}, and a finite number was expected")
    if negative is not None and guidance == 1:
        raise UserError("--negative was given, and --guidance 1 leads away from nothing; pass another --guidance")

    from bigdit import libraries, log

    libraries.prepare()

    import torch
    from PIL import Image

    from bigdit.checkpoint import find_checkpoint
    from bigdit.files import replacing, write_json
    from bigdit.sampling import Sampler, SamplingOptions
    from bigdit.sampling.grid import grid_png
    from bigdit.shortage import told

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found, notices = find_checkpoint(checkpoint)
    for line in notices:
        log.notice(line)
    with told(f"--checkpoint {found.folder}: loading it", device, "a device with more memory is needed"):
        loaded = Sampler(found, device, ema=ema)
    height, width = height_width or loaded.buckets[0]
    options = SamplingOptions(height, width, steps, guidance, negative, drawn_by, seed)
    pictures, rows = [], []
    with log.progress("sample", total=len(wanted), unit="images") as advance:
        for i, pixels in enumerate(loaded.sample(wanted, options)):
            picture = pixels.squeeze(0).numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy()
            path = out / f"{i:05d}.png"
            with replacing(path) as temporary:
                Image.fromarray(picture).save(temporary, format="png")
            pictures.append(picture)
            rows.append({"file": path.name, "caption": wanted[i], "seed": seed + i})
            advance(1)
    with replacing(out / "grid.png") as temporary:
        temporary.write_bytes(grid_png(pictures, wanted))
    report = {
        "checkpoint": str(found.folder),
        "ema": ema,
        "steps": steps,
        "guidance": guidance,
        "negative": negative,
        "pictures": rows,
    }
    write_json(out / "samples.json", report)
    if as_json:
        log.emit_json(report)
    log.notice(f"wrote {len(rows)} pictures, samples.json and {out / 'grid.png'}")


def _lines(path: Path | None) -> list[str]:
    from bigdit.errors import UserError

    if path is None:
        return []
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--captions {path} cannot be read: {error}") from None


def _sampler(name: str | None) -> SamplerName | None:
    from bigdit.errors import UserError, shown
    from bigdit.objective_spec import SamplerName

    known: dict[str, SamplerName] = {each: each for each in get_args(SamplerName)}
    if name is not None and name not in known:
        raise UserError(f"--sampler {shown(name)[:40]!r}: there is no such sampler; known: {', '.join(known)}")
    return None if name is None else known[name]


def _size(text: str) -> tuple[int, int]:
    from bigdit.errors import UserError
    from bigdit.numbers import LARGEST_SIDE

    found = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text.lower())
    height, width = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (height and width):
        raise UserError(f"--size expects HEIGHTxWIDTH in pixels, such as 512x768, and {text[:40]!r} was found")
    if max(height, width) > LARGEST_SIDE:
        raise UserError(f"--size is {text}, and a side has {LARGEST_SIDE} pixels at most")
    return height, width
