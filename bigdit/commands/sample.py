"""`bigdit sample`: generate images or videos from captions or classes, and a grid of them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from bigdit import log
from bigdit.commands import EmaWidth, Json, Set, with_options
from bigdit.errors import UserError, shown
from bigdit.files import check_writable, near, write_bytes, write_json, writing_for
from bigdit.units import LARGEST, LARGEST_SIDE, how_many

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from bigdit.checkpoint import Checkpoint
    from bigdit.objective_spec import SamplerName
    from bigdit.sampling import Base, Sampler, SamplingOptions

MOST = 100_000
"""The most of --count: files are numbered with five digits."""


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """The options of the command."""

    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for images and grid.png, or videos and grid.webp.")]
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint, or the output of a run: its latest checkpoint.")
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="In place of --checkpoint: a run's YAML. The model that it starts from (model.init_from) generates.",
        ),
    ] = None
    overrides: Set = field(default_factory=list)
    caption: Annotated[
        list[str],
        typer.Option("--caption", metavar="TEXT", help="A caption, or a class as with --label; repeatable."),
    ] = field(default_factory=list)
    label: Annotated[
        list[str],
        typer.Option(
            "--label", metavar="CLASS", help="Name or number of a class, for class-conditional models; repeatable."
        ),
    ] = field(default_factory=list)
    captions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text file with one caption or class per line.")
    ] = None
    image: Annotated[
        list[Path],
        typer.Option(
            "--image",
            metavar="FILE",
            help="Image to edit, for edit models; image with x.mask.png beside it, for fill models; first frame, for "
            "image-to-video models: an image, or a video whose first frame is used. Give it once for all captions, or "
            "once for each.",
        ),
    ] = field(default_factory=list)
    size: Annotated[
        str | None,
        typer.Option(metavar="HxW", help="Pixels; FxHxW for a video of F frames. Default: the run's first bucket."),
    ] = None
    steps: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Steps of the sampler.")] = 20
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For flow matching: euler (the default), heun, dpmsolver++ or unipc. For DDPM: dpmsolver++ (the "
            "default), unipc or ddim.",
        ),
    ] = None
    guidance: Annotated[float, typer.Option(min=0, metavar="SCALE", help="Classifier-free guidance; 1: none.")] = 3.0
    negative: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Negative prompt. Default: the empty caption, or no class."),
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=LARGEST, metavar="N", help="Image i is generated from seed + i.")] = 0
    count: Annotated[
        int, typer.Option(min=1, max=MOST, metavar="N", help="Images or videos of each caption or class.")
    ] = 1
    with_captions: Annotated[
        bool,
        typer.Option(
            "--with-captions",
            help="Write each caption beside its image, and no grid. So the folder is a source of data.images, such as "
            "a regularisation set.",
        ),
    ] = False
    ema: Annotated[bool, typer.Option("--ema", help="Use the EMA of the weights (strategy.ema).")] = False
    ema_width: EmaWidth = None
    as_json: Json = False


@with_options(SampleArguments)
def run(args: SampleArguments) -> None:
    """Generate images or videos for captions or classes, with a checkpoint or the model that a run starts from."""
    from bigdit import libraries

    libraries.prepare()  # before what reads --image imports them
    from bigdit.sampling.conditions import asked_image

    given = {"--label": args.label, "--caption": args.caption}
    given |= {f"--captions {args.captions}": _read_captions(args.captions)}
    prompts = [each for texts in given.values() for each in texts for _ in range(args.count)]
    _check(args, prompts)
    bucket = _parse_size(args.size) if args.size else None
    sampler = _parse_sampler(args.sampler)
    images = [asked_image("--image", path) for path in args.image]

    import torch

    from bigdit.sampling import SamplingOptions
    from bigdit.shortage import bounded
    from bigdit.sources.captions import OF_SAMPLES

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found, name = _source(args)
    with bounded(device), writing_for("--out"):
        loaded = _load(args, found, name, device)
        *frames, height, width = bucket or loaded.buckets[0]
        options = SamplingOptions(
            height, width, args.steps, args.guidance, args.negative, sampler, args.seed, frames=(*frames, None)[0]
        )
        loaded.check(options, given, len(images))
        images = loaded.repeated(images, args.count)
        rows, grid = _generate(loaded, prompts, options, images, args.out, args.with_captions)
    report = _document(args, found, rows)
    with writing_for("--out"):
        write_json(args.out / OF_SAMPLES, report)
    if args.as_json:
        log.emit_json(report)
    wrote = f"{how_many(len(rows), 'video' if frames else 'image')}{' with captions' if args.with_captions else ''}"
    log.notice(f"wrote {wrote}, samples.json and {grid}" if grid else f"wrote {wrote} and samples.json to {args.out}")


def _check(args: SampleArguments, prompts: Sequence[str]) -> None:
    """Raise UserError for contradicting options, and a folder that cannot be written."""
    if (args.checkpoint is None) == (args.config is None):
        raise UserError("give one of --checkpoint DIR and --config FILE: what was trained, or what a run starts from")
    if args.config is None and args.overrides:
        raise UserError("--set goes with --config; a checkpoint has its own run")
    if args.config is not None and (args.ema or args.ema_width is not None):
        raise UserError("--ema and --ema-width are of a checkpoint; with --config leave them out")
    if not prompts:
        raise UserError("no caption was given; pass --caption TEXT, --label CLASS, or --captions FILE")
    if not math.isfinite(args.guidance):
        raise UserError(f"--guidance is {args.guidance}, and a finite number was expected")
    if args.negative is not None and args.guidance == 1:
        raise UserError("--negative has no effect with --guidance 1; pass another --guidance")
    check_writable("--out", args.out)
    if args.out.is_dir() and any(args.out.iterdir()):
        raise UserError(f"--out {args.out} holds files already; name another folder")


def _source(args: SampleArguments) -> tuple[Checkpoint | Base, str]:
    """The checkpoint or the run that generates, and its name in errors."""
    from bigdit.checkpoint import find_checkpoint

    if args.checkpoint is None:
        assert args.config is not None
        return _starting_model(args.config, args.overrides), f"--config {args.config}"
    found, notices = find_checkpoint(args.checkpoint)
    for line in notices:
        log.notice(line)
    return found, f"--checkpoint {found.folder}"


def _load(args: SampleArguments, found: Checkpoint | Base, name: str, device: torch.device) -> Sampler:
    """Load the sampler. Raises UserError for options that its model does not take."""
    from bigdit.checkpoint import Checkpoint, PostHoc
    from bigdit.sampling import Sampler
    from bigdit.shortage import memory_errors

    with memory_errors(f"{name}: loading it", device, "a device with more memory is needed"):
        posthoc = None
        if isinstance(found, Checkpoint) and args.ema_width is not None:
            posthoc = PostHoc(found, args.ema_width)
            log.notice(posthoc.message)
        loaded = Sampler(found, device, ema=args.ema, posthoc=posthoc)
        if args.with_captions and not loaded.captions:
            raise UserError("--with-captions: this model takes classes; leave it out")
        if args.label and loaded.captions:
            raise UserError(f"--label is {args.label[0]!r}, and this model takes captions; pass --caption TEXT")
    return loaded


def _document(args: SampleArguments, found: Checkpoint | Base, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of samples.json."""
    from bigdit.checkpoint import Checkpoint

    return {
        "checkpoint": str(found.folder) if isinstance(found, Checkpoint) else None,
        "init_from": None if isinstance(found, Checkpoint) else str(found.run.model.init_from),
        **{key: getattr(args, key) for key in ("ema", "ema_width", "steps", "guidance", "negative")},
        "images": rows,
    }


def _starting_model(config: Path, overrides: list[str]) -> Base:
    """The model that a run starts from. Raises UserError if the run cannot train, or starts from random weights."""
    from bigdit.config.check import check_paths
    from bigdit.config.stages import load_stages
    from bigdit.sampling import Base
    from bigdit.train.prepare import prepare

    run = load_stages(config, overrides)[0].run
    check_paths(config, [run])
    spec = prepare(run)
    if run.model.init_from is None:
        raise UserError(f"--config {config}: model.init_from is missing, and random weights generate noise; set it")
    if run.model.lora_from is not None:
        log.notice("note: model.init_from generates, without the adapters of model.lora_from")
    return Base(run, spec)


def _generate(
    sampler: Sampler,
    prompts: Sequence[str],
    options: SamplingOptions,
    images: Sequence[Image.Image],
    out: Path,
    with_captions: bool,
) -> tuple[list[dict[str, Any]], Path | None]:
    """Write a file for each prompt, and a grid or the prompts. Returns a row for each file, and the grid's path."""
    from bigdit.sampling.grid import grid_png, moving_grid, png, webp

    moving, fps = options.frames is not None, sampler.fps or 1.0  # only videos have one
    suffix, unit = (".webp", "videos") if moving else (".png", "images")
    shown = functools.partial(_with_progress, unit=unit)
    generated, rows = [], []
    for i, pixels in enumerate(sampler.sample(prompts, options, images, shown)):
        found = pixels.squeeze(0).numpy() if len(pixels) == 1 else pixels.movedim(0, -1).numpy()
        path = out / f"{i:05d}{suffix}"
        write_bytes(path, webp(found, fps) if moving else png(found))
        rows.append({"file": path.name, "caption": prompts[i], "seed": options.seed + i})
        if with_captions:
            write_bytes(path.with_suffix(".txt"), prompts[i].encode())
        else:
            generated.append(found)
    if with_captions:
        return rows, None
    grid = out / f"grid{suffix}"
    write_bytes(grid, webp(moving_grid(generated), fps) if moving else grid_png(generated, prompts))
    return rows, grid


def _with_progress(what: str, found: Iterator[torch.Tensor], total: int, unit: str) -> Iterator[torch.Tensor]:
    """Yield `found` with a progress bar."""
    with log.progress(what, total=total, unit=unit) as advance:
        for each in found:
            yield each
            advance(1)


def _read_captions(path: Path | None) -> list[str]:
    if path is None:
        return []
    from bigdit.documents import read_file
    from bigdit.sources.captions import decoded
    from bigdit.sources.protocol import Unusable

    try:
        text = decoded(read_file(path, f"--captions {path}", near(path)), str(path))
    except Unusable as error:
        raise UserError(f"--captions: {error}") from None
    if found := [line.strip() for line in text.splitlines() if line.strip()]:
        return found
    raise UserError(f"--captions {path} is empty; write a caption or a class into each line")


def _parse_sampler(name: str | None) -> SamplerName | None:
    from bigdit.objective_spec import SAMPLERS, SamplerName

    known: dict[str, SamplerName] = {each: each for each in get_args(SamplerName)}
    if name is not None and name not in known:
        of_each = "; ".join(f"for {objective}: {', '.join(names)}" for objective, names in SAMPLERS.items())
        near = [each for each in known if name.strip() and each.startswith(name.strip().casefold())]
        meant = f"did you mean {', '.join(near)}? " if near else ""
        raise UserError(f"--sampler {shown(name)[:40]!r}: unknown sampler; {meant}{of_each}")
    return None if name is None else known[name]


def _parse_size(text: str) -> tuple[int, ...]:
    sizes = tuple(map(int, text.lower().split("x"))) if re.fullmatch(r"(\d{1,9}x){1,2}\d{1,9}", text.lower()) else (0,)
    if not all(sizes):
        raise UserError(
            f"--size expects HEIGHTxWIDTH in pixels, such as 512x768, or FRAMESxHEIGHTxWIDTH, and {text[:40]!r} was "
            "found"
        )
    if max(sizes) > LARGEST_SIDE:
        raise UserError(f"--size is {text}, and a side has {LARGEST_SIDE} pixels at most")
    return sizes
