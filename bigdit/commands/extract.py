"""`bigdit extract`: encode the images and captions of a run into its latent and embedding cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bigdit import log
from bigdit.commands import Config, Json, Set, StageOption
from bigdit.errors import UserError
from bigdit.files import writing_for
from bigdit.units import duration, how_many

if TYPE_CHECKING:
    from bigdit.config.run import RunConfig
    from bigdit.extract.extract import RunJob
    from bigdit.store.part import Skipped
    from bigdit.store.report import ExtractReport, StoreReport
    from bigdit.strategy import ModelSpec


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    stage: StageOption = None,
    start_index: Annotated[int | None, typer.Option(metavar="N", help="Encode from this image on.")] = None,
    end_index: Annotated[int | None, typer.Option(metavar="N", help="Stop before this image.")] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="K/N", help="Encode the K-th of N equal shares, from 1/N to N/N.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes that encode. Default: data.workers.")
    ] = None,
    engine: Annotated[
        Literal["local", "slurm", "ray"],
        typer.Option(metavar="NAME", help="What starts the workers: local, slurm or ray."),
    ] = "local",
    tasks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With slurm or ray: number of tasks, each with --workers.")
    ] = None,
    resources: Annotated[
        list[str],
        typer.Option(
            "--resource",
            metavar="KEY=VALUE",
            help="What each task requests: parameters of submitit (slurm_partition) or of Ray (num_gpus).",
        ),
    ] = [],  # noqa: B006
    by_content: Annotated[
        bool,
        typer.Option(
            "--by-content",
            help="Compare the content of all files with the cache, even if names, sizes and times are equal.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Encode images and captions once, in parallel. Run it again to resume, or to encode what was added or edited.

    For a run with stages, it fills the caches of all stages in turn. You may run it several times at once, on any
    machines that share the folder: the work is shared.
    """
    from bigdit import libraries

    libraries.prepare()
    from bigdit.config.check import check_paths
    from bigdit.config.stages import load_chosen
    from bigdit.extract.batch_size import with_batch_size
    from bigdit.extract.extract import extract

    asked, reports = _engine(engine, tasks, resources), []
    runs = [each.run for each in load_chosen(config, overrides, stage)]
    models = _check(runs)
    check_paths(config, runs)
    for number, run_config in enumerate(runs):
        if any((run_config.data, run_config.encoders) == (other.data, other.encoders) for other in runs[:number]):
            continue  # several stages train on one cache
        sized = with_batch_size(run_config, workers or run_config.data.workers)
        with writing_for("data.features"):
            report = extract(
                sized,
                models[number],
                workers,
                start=start_index,
                end=end_index,
                shard=shard,
                engine=asked,
                by_content=by_content,
            )
        reports.append(report)
        if not as_json:
            _print(report, run_config.data.samples)
    if as_json:
        documents = [report.model_dump(mode="json") for report in reports]
        log.emit_json(documents if len(runs) > 1 else documents[0])


def _check(runs: Sequence[RunConfig]) -> list[ModelSpec]:
    """The models of the runs. Raises UserError, before hours of encoding, if a run could not train."""
    from bigdit.catalog.resolve import model_spec
    from bigdit.config.check import check
    from bigdit.config.stages import of_each

    def checked(run: RunConfig) -> ModelSpec:
        model = model_spec(run.model)
        check(run.model_copy(update={"samples": None}), model)  # the cache does not depend on generated samples
        return model

    try:
        return of_each(runs, checked)
    except UserError as error:
        of_training = re.compile(r"(stages\.\d+: )?(train|optimizer|engine)\.")
        why = "; a run that cannot train is not encoded"
        raise UserError(*(f"{line}{why if of_training.match(line) else ''}" for line in error.problems)) from None


def _engine(name: str, tasks: int | None, resources: list[str]) -> RunJob | None:
    from bigdit.extract.tasks import Ray, Slurm

    asked = _parse(resources)
    if name == "slurm":
        return Slurm(tasks or 1, asked)
    if name == "ray":
        return Ray(tasks or 1, asked)
    if tasks or asked:
        raise UserError("--tasks and --resource need --engine slurm or ray; --engine local has --workers")
    return None


def _parse(resources: list[str]) -> dict[str, Any]:
    from bigdit.documents import parse_value

    if wrong := [text for text in resources if "=" not in text]:
        raise UserError(f"--resource: KEY=VALUE was expected, and {wrong[0]} was found")
    pairs = (text.partition("=") for text in resources)
    return {key: parse_value(value, f"--resource {key}") for key, _, value in pairs}


def _print(report: ExtractReport, samples: str) -> None:
    from bigdit.store.report import FILE as REPORT

    speed = f"{report.images_per_s:.1f} {samples}/s" if report.parts else "nothing was left to do"
    done = f"{duration(report.seconds)}, {speed}"
    if report.store is None:
        done_here = f"{how_many(report.images, 'image')} in {how_many(report.parts, 'part')}"
        log.say(f"{report.features}: {done_here} done; the others are missing")
        log.say(f"{done}; `bigdit features info {report.features}` shows the cache")
        return
    buckets = ", ".join(f"{count} of {shape}" for shape, count in report.store.buckets.items())
    log.say(f"{report.features}: {encoded(report.store)} ({buckets})")
    log.say(f"{done}; report: {report.features / REPORT}")
    print_captions(report.store)
    print_skipped(report.store.skipped)
    if report.store.skipped and not report.parts:
        log.say("after mending files that a table names, run `bigdit extract --by-content`")


def encoded(store: StoreReport) -> str:
    """`4 of 11 videos encoded`."""
    return f"{store.encoded} of {how_many(store.images, kind_of_samples(store))} encoded"


def kind_of_samples(store: StoreReport) -> str:
    """`image`, `video`, or both, by the shape of the latents."""
    moving = {shape.count("x") == 3 for shape in store.buckets}  # [channels, frames, height, width]
    return {(True,): "video", (False, True): "image and video"}.get(tuple(sorted(moving)), "image")


def print_captions(store: StoreReport) -> None:
    """Log how long captions are, and how many each tokenizer cut."""
    from bigdit.store.report import caption_lines

    for line in caption_lines(store):
        log.say(line)


def print_skipped(skipped: list[Skipped]) -> None:
    """Log the first ten skipped samples, with reasons."""
    if skipped:
        log.say(f"{len(skipped)} skipped:")
        for item in skipped[:10]:
            log.say(f"  {item.name}: {item.reason}")
        if len(skipped) > 10:
            log.say(f"  and {len(skipped) - 10} more in the report")
