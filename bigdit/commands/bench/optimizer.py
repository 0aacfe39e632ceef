"""`bigdit bench optimizer`: what a step of each optimizer takes over a model's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from bigdit.commands.options import Json, Out, Rounds, Set

if TYPE_CHECKING:
    from bigdit.bench.optimizer import Contestants
    from bigdit.catalog import CatalogModel
    from bigdit.spec import ModelSpec, OptimizerName


def run(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model as of `bigdit plan --model`.")] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Its sibling with so many blocks of each kind at most.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Or the model of a run's YAML.")] = None,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME,NAME,…", help="Those of bigdit/optim; all if left out.")
    ] = None,
    rounds: Rounds = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Seconds a step, and bytes of state a parameter, of optimizers by turns with torch's AdamW, fused.

    On this machine's card where it has one, else on its CPU; over fp32 weights, as engines keep them.
    """
    from bigdit import libraries, log
    from bigdit.bench.interleaved import Load

    load = Load.now()
    names = _names(optimizer)
    spec, catalogued = _model(model, blocks, config, overrides)
    libraries.prepare()
    from bigdit.bench.optimizer import bench_optimizers, check_room, contestants, shapes_of
    from bigdit.report.comparison import show

    what = spec.name if blocks is None else f"{spec.name} with --blocks {blocks}"
    with log.err.status(f"a step of each over single tensors of {spec.name}") as status:
        shapes = shapes_of(spec)
        asked = contestants(names, shapes)
        check_room(asked, shapes, what, lambda free: _nearest(asked, catalogued, free))
        found = bench_optimizers(asked, shapes, what, rounds=rounds, load=load, said=status.update)
    show(found, out, as_json=as_json)


def _names(asked: str | None) -> list[OptimizerName]:
    from pydantic import TypeAdapter, ValidationError

    from bigdit.errors import UserError, shown
    from bigdit.spec import OptimizerName

    words = [] if asked is None else asked.split(",")
    try:
        return TypeAdapter(list[OptimizerName]).validate_python(words)
    except ValidationError as error:
        wrong = words[int(error.errors()[0]["loc"][0])]
        known = ", ".join(get_args(OptimizerName))
        raise UserError(f"--optimizer {shown(wrong)[:40]!r}: there is no such optimizer; known: {known}") from None


def _model(
    name: str | None, blocks: int | None, config: Path | None, overrides: list[str]
) -> tuple[ModelSpec, CatalogModel | None]:
    """What is asked for, and, where --model names it, the whole model of which it may be a sibling."""
    from bigdit import catalog
    from bigdit.catalog.resolve import model_spec
    from bigdit.config import load_stages
    from bigdit.errors import UserError

    if (name is None) == (config is None):
        raise UserError("one of --model NAME and --config RUN.yaml says whose parameters are stepped; give one")
    if config is not None:
        if blocks is not None:
            raise UserError("--blocks goes with --model, and --config was given; use --set model.kwargs.… there")
        return model_spec(load_stages(config, overrides)[0].run.model), None
    assert name is not None
    if overrides:
        raise UserError("--set goes with --config, and --model was given; leave it out")
    found = catalog.find_model(name)
    if found.obstacle is not None:
        raise UserError(f"--model {found.name}: {found.obstacle}")
    return found.spec if blocks is None else _with_blocks(found, blocks), found


def _with_blocks(model: CatalogModel, blocks: int) -> ModelSpec:
    from bigdit.catalog import FAMILIES

    most = blocks + blocks % 2 if FAMILIES[model.spec.class_name].even else blocks
    lengths = {argument: min(most, length) for argument, length in _lengths(model).items()}
    kwargs = model.spec.kwargs | lengths
    if kwargs.get("dual_attention_layers"):  # of SD3.5: numbers of blocks
        kwargs["dual_attention_layers"] = [at for at in kwargs["dual_attention_layers"] if at < most]
    if "llama_layers" in kwargs:  # of HiDream: the layer of Llama that each block reads
        kwargs["llama_layers"] = kwargs["llama_layers"][: sum(lengths.values())]
    return model.spec.model_copy(update={"kwargs": kwargs})


def _lengths(model: CatalogModel) -> dict[str, int]:
    """How many blocks each list of like ones has, by the argument that says it."""
    from bigdit.catalog import FAMILIES

    arguments = FAMILIES[model.spec.class_name].depths
    return {arguments[name]: length for name, length in model.block_lists if name in arguments}


def _nearest(asked: Contestants, model: CatalogModel | None, free: int) -> str:
    """What would fit into so many bytes: the largest --blocks, where there is one."""
    import bisect

    from bigdit.bench.optimizer import shapes_of

    fewer = "name fewer optimizers with --optimizer"
    if model is None:
        return f"{fewer}, or choose a smaller model"
    sizes = range(1, max(_lengths(model).values(), default=0))
    fitting = bisect.bisect_right(
        sizes, free, key=lambda blocks: asked.bytes_for(shapes_of(_with_blocks(model, blocks)))
    )
    return f"the largest that fits: --blocks {fitting}; or {fewer}" if fitting else fewer
