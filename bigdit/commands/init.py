"""`bigdit init`: a run.yaml for a model, a GPU and a folder of images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bigdit import log
from bigdit.commands import EXIT_DOES_NOT_FIT
from bigdit.errors import UserError
from bigdit.units import how_many

if TYPE_CHECKING:
    from bigdit.search.plan import ResolvedRequest

T = TypeVar("T")


def run(
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model of `bigdit models`, or a diffusers folder with its weights."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="A GPU of `bigdit gpus`, or auto for this machine's.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A folder or a table of images or videos with captions.")
    ] = None,
    lora: Annotated[int | None, typer.Option(min=0, metavar="RANK", help="Rank of LoRA; 0: full fine-tuning.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder for run.yaml and its plan. Default: plans/MODEL.")
    ] = None,
) -> int:
    """Write a run.yaml for your model, GPU and images, with a plan that fits. On a terminal it asks for what is
    missing.

    Exit status: 0 if it fits or is tight; 2 if it does not fit, and nothing is written.
    """
    from bigdit.emulator.interpreter import cuda_python
    from bigdit.report.how_to_run import RUN, commands, obstacle, skeleton
    from bigdit.report.page import write_plan
    from bigdit.report.plan import show_short
    from bigdit.search.answer import make_plan
    from bigdit.search.resolve import resolve_request

    cuda_python()  # first: a missing one is an error at once
    model = model or _ask("--model", "Model (a name of `bigdit models`)", "sana-600m", _model)
    images = _images(images) if images else _ask("--images", "Folder of images with captions", "images", _images)
    gpu = gpu or _ask("--gpu", "GPU (a name of `bigdit gpus`, or auto for this machine's)", "auto", _gpu)
    rank = _ask("--lora", "Rank of LoRA (0: full fine-tuning)", "16", _rank) if lora is None else lora
    request = resolve_request(model=model, gpu=gpu, lora=rank or None, full=None if rank else True)
    folder = out or Path("plans", request.model.name)
    if folder.exists():
        raise UserError(f"--out: {folder} exists already, and was not changed; name another folder")
    _check_images(request, images)  # before the plan, which takes a minute
    with log.status(f"planning the training of {request.model.name}") as status:
        plan = make_plan(request, progress=status)
    text, why = skeleton(plan, images, folder.name), obstacle(plan)
    show_short(plan, str(folder / RUN))
    if why is not None or text is None:
        log.notice(f"wrote nothing: {why or 'its VAE is unknown'}; `bigdit plan` says more")
        return EXIT_DOES_NOT_FIT
    write_plan(plan, folder, run=text)
    log.say(f"wrote {folder / RUN}; next:")
    downloads = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# hf download ")]
    for each in [*downloads, *(" ".join(command.words) for command in commands(plan, folder)[:2])]:
        log.say(f"  {each}")
    return 0


def _ask(option: str, what: str, default: str, read: Callable[[str], T]) -> T:
    """Ask on the terminal until the answer is valid. Raises UserError if stdin is no terminal."""
    if not sys.stdin.isatty():
        raise UserError(f"{option} is missing; give it, or run `bigdit init` on a terminal, where it asks")

    def value(text: str) -> T:
        try:
            return read(text)
        except UserError as error:
            raise typer.BadParameter("; ".join(error.problems)) from None

    found: T = typer.prompt(what, default, value_proc=value)
    return found


def _model(text: str) -> str:
    from bigdit.catalog import find_model

    find_model(text)
    return text


def _images(asked: str | Path) -> Path:
    if not Path(asked).exists():
        raise UserError(f"--images: {asked} does not exist in {Path.cwd()}; name the folder of your images")
    return Path(asked)


def _gpu(text: str) -> str:
    from bigdit.catalog.machine import resolve_gpu

    resolve_gpu(text)
    return text


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"--lora expects a rank such as 16, or 0, and {text[:40]!r} was found")
    return int(text)


def _check_images(request: ResolvedRequest, images: Path) -> None:
    """Log the number of samples, except of tars, which need an index. Raises UserError if they cannot be read."""
    from bigdit.config.data import DataConfig
    from bigdit.report.how_to_run import source_of
    from bigdit.sources.open import check_sources, kind_of, open_source
    from bigdit.sources.videos import moves

    frames = [request.frames] if request.frames else []
    clip = request.model.clip
    data: dict[str, Any] = {"images": source_of(request.model, images), "buckets": [[*frames, *request.resolution]]}
    data |= {"references": request.model.references, **({"fps": clip.fps} if clip else {})}
    found = DataConfig.model_validate(data)
    check_sources(found, listed=False)
    kind = kind_of(found.images[0], "data.images")
    if kind == "webdataset":
        return
    source = open_source(found)
    count = len(source)
    if kind == "folder" and (request.frames or 1) > 1:
        count = sum(moves(images / each.name) for each in source.entries())
    if not count:
        raise UserError(
            f"--images: {images} holds {how_many(len(source), 'image')} and no video, and {request.model.name} trains "
            f"on {request.frames} frames; name a folder of videos, or a model of images"
        )
    left = f"; {how_many(len(source) - count, 'image')} of one frame will be skipped" if count < len(source) else ""
    log.notice(f"found {how_many(count, 'video' if left else 'sample' if clip else 'image')} in {images}{left}")
