"""How to run a plan: its run.yaml, with folders to fill in, and the commands for its engine."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from bigdit.catalog import CatalogModel
from bigdit.catalog.encoders import caption_tokens, online_encoders
from bigdit.catalog.families import PUBLISHED, embeds_first_frame, fills, objective_of, takes_first_frame
from bigdit.catalog.models import TextInput, before_download, models, repositories
from bigdit.catalog.resolve import CONFIG
from bigdit.config.data import PART_SIZE, VaeCodec, part_size
from bigdit.config.plan_file import FILE
from bigdit.config.run import TrainConfig
from bigdit.dist import PORT
from bigdit.documents import parse_yaml
from bigdit.errors import UserError
from bigdit.objective_spec import FlowMatchingSpec, partial
from bigdit.processes import entry
from bigdit.recipes import Beginning, beginning, download, weights_folder
from bigdit.report.words import samples
from bigdit.search.of_run import carried, section
from bigdit.search.plan import HOUR, Plan
from bigdit.strategy import Strategy

_HEAD = """\
# Written by `bigdit plan`: the strategy is the plan's; plan.yaml in this folder has its predictions.
# {}Paths are relative to the folder that commands run in. `make docs` builds a reference of all keys.
"""
RUN = "run.yaml"
_FROM_SCRATCH = Beginning(steps=100_000, warmup_steps=1000, lr=1e-4)
"""For a run from random weights without --images; the warm-up has at most a tenth of the steps."""
_OTHER_TEXT = "`bigdit extract` cannot encode the text of {} ({}): encode it elsewhere."
_VAES = get_args(VaeCodec.model_fields["class_name"].annotation)
FOLDER = "path/to"
"""The beginning of folders to fill in."""


def skeleton(plan: Plan, images: Path | None = None, name: str = "") -> str | None:
    """The YAML; None for a model that cannot be trained, or with an unknown VAE.

    `images`: the source; `name`: of the folders of the cache and of the run. None: placeholders for all of them.
    """
    request = plan.request
    model = request.model
    if not model.trainable or model.vae.class_name not in _VAES:
        return None
    size = plan.chosen.strategy.micro_batch_size  # one for all buckets
    fitting = ((limit.height, limit.width) for limit in plan.buckets if limit.recommended >= size)
    online = plan.chosen.strategy.features == "online"  # of one bucket
    sizes = dict.fromkeys((request.resolution, *(() if online else fitting)))
    vae_dtype, text_dtype = _dtypes(plan) if online else ({}, {})
    spec, weights, start = model.spec, _weights(plan), _beginning(plan)
    steps = _steps(plan)
    known = model.params is not None  # in the catalogue; a user's own model is written out
    named = _folder(model)
    source, features, output = (
        (f"{FOLDER}/images", f"{FOLDER}/features", f"{FOLDER}/run")
        if images is None
        else (str(images), f"features/{name}", f"runs/{name}")
    )
    pipeline, vae = model.pipeline or named, named if model.pipeline is None or _vae_lent(model) else model.pipeline
    run = {
        "model": ({"name": model.name} if known else {"class_name": spec.class_name, "kwargs": spec.kwargs})
        | ({} if weights is None else {"init_from": weights}),
        "data": {
            "images": source_of(model, source),
            **({} if online else {"features": features}),
            "buckets": [[*_frames(plan), *sides] for sides in sizes],
            **({} if model.clip is None else {"fps": model.clip.fps}),
            **({"references": model.references} if model.references else {}),
            **({"fill": True} if fills(spec) else {}),
            **_part_size(plan),
        },
        "encoders": {
            "image": {"name": "vae", "class_name": model.vae.class_name, "path": f"{vae}/vae", **vae_dtype},
            **({} if model.text is None else {"text": _text(pipeline, model.text) | text_dtype}),
            **_first_frame(pipeline, model),
        },
        "objective": _objective(model),
        "strategy": section(_learning(plan.chosen.strategy, start.lr)),
        "train": {
            "steps": steps,
            "warmup_steps": min(start.warmup_steps, steps // 10),
            "lr_schedule": "constant",
            **_checkpoint_every(plan),
        },
        "plan": FILE,
        "output": output,
    }
    head = _HEAD.format("" if images else "Fill in the folders. ")
    return head + "".join(f"# {note}\n" for note in _notes(plan)) + as_yaml(run)


def source_of(model: CatalogModel, images: Path | str) -> str | dict[str, str]:
    """The value of data.images for a folder or table: with classes for a model without captions."""
    return str(images) if model.text else {"path": str(images), "label": "folder"}


def _steps(plan: Plan) -> int:
    return plan.run.steps if plan.run else _beginning(plan).steps


SAVED_BYTES_PER_S = 140e6
"""Checkpoint bytes per second of a process: 5.84 GiB in 42 s, on a busy machine (benchmarks/saving.md)."""
_LOST_S = 1800
"""The most seconds between two checkpoints, unless saving would take more than a tenth of them."""


def _save_seconds(plan: Plan) -> float:
    return plan.host.checkpoint_bytes / SAVED_BYTES_PER_S


def _checkpoint_every(plan: Plan) -> dict[str, int]:
    """train.checkpoint_every, if steps are too slow for its default."""
    between = max(_LOST_S, 10 * _save_seconds(plan))
    steps = max(1, int(between / plan.chosen.step.seconds.high))
    rounded = int(str(steps)[0]) * 10 ** (len(str(steps)) - 1)
    usual = TrainConfig.model_fields["checkpoint_every"].default
    return {"checkpoint_every": rounded} if rounded < usual else {}


def _learning(strategy: Strategy, lr: float) -> Strategy:
    if strategy.optimizer.name == "prodigy":  # its lr is a factor
        return strategy
    return strategy.model_copy(update={"optimizer": strategy.optimizer.model_copy(update={"lr": lr})})


def as_yaml(document: dict[str, Any]) -> str:
    """YAML with keys in their order, and short sections on one line."""
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)


def renewed(text: str, plan: Plan) -> str:
    """A run's edited YAML with the strategy of another plan. Learning rate and other constants of the run stay.

    Returns other text unchanged.
    """
    try:
        document = parse_yaml(text)
        strategy = carried(document, plan.chosen.strategy)
    except (UserError, ValueError):
        return text
    block = as_yaml({"strategy": section(strategy)})
    return re.sub(r"^strategy:.*?(?=^\S|\Z)", lambda _: block, text, count=1, flags=re.MULTILINE | re.DOTALL)


def _weights(plan: Plan) -> str | None:
    """The folder of weights to start from, published or a user's own; None for random weights."""
    model = plan.request.model
    known = model.pipeline is not None or repositories(model.name)
    if plan.request.from_scratch or not (known or plan.chosen.strategy.frozen):
        return None
    return f"{model.pipeline or _folder(model)}/{model.folder}"


def _beginning(plan: Plan) -> Beginning:
    if _weights(plan) is None:
        return _FROM_SCRATCH
    return beginning(plan.request.model.name, lora=plan.chosen.strategy.lora is not None)


def _objective(model: CatalogModel) -> dict[str, Any]:
    """The model's own objective; for flow matching the distribution and shift of t."""
    own = objective_of(model.spec, None)
    settings = own.model_dump(mode="json", exclude_defaults=True)
    if isinstance(own, FlowMatchingSpec):
        keys = {"t_distribution", "shift"} | ({"t_range"} if partial(own) else set())
        settings = own.model_dump(mode="json", include=keys)
    return {"name": own.name, **settings}


def _dtypes(plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """The dtypes of VAE and text encoders with features online, if they are not the default."""
    encoders = online_encoders(plan.request.model, plan.batch, plan.chosen.strategy.text_dtype)
    dtypes = encoders.vae.dtype, next((each.dtype for each in encoders.text), "fp32")
    vae, text = ({} if each == "fp32" else {"dtype": each} for each in dtypes)
    return vae, text


def _frames(plan: Plan) -> list[int]:
    """The frames of a bucket of videos; empty for images."""
    if len(plan.batch.latents) == 3:
        return []
    return [1 + (plan.batch.latents[1] - 1) * plan.request.model.vae.temporal_downsample]


def _part_size(plan: Plan) -> dict[str, int]:
    """data.part_size, if samples are too large for its default."""
    data = plan.dataset
    size = PART_SIZE if data is None else part_size(data.store_bytes.high / data.images)
    return {} if size == PART_SIZE else {"part_size": size}


def _text(pipeline: str, text: TextInput) -> dict[str, Any]:
    tokens = caption_tokens(text)
    return {"pipeline": pipeline} | ({"max_tokens": tokens} if tokens else {})


def _first_frame(pipeline: str, model: CatalogModel) -> dict[str, Any]:
    """encoders.first_frame, for image-to-video models."""
    if not model.first_frame and not takes_first_frame(model.spec):
        return {}
    return {"first_frame": {"pipeline": pipeline} if embeds_first_frame(model.spec) else {}}


def _folder(model: CatalogModel) -> str:
    """The folder of weights and encoders: of the repository on the hub, or a placeholder."""
    known = repositories(model.name)
    return weights_folder(known[0]) if known else f"{FOLDER}/{_named(model)}"


def _named(model: CatalogModel) -> str:
    """The name of the folder with encoders: the pipeline's, if all models of the class have the same encoders."""
    vaes = {each.vae.name for each in models() if each.spec.class_name == model.spec.class_name}
    return model.text_pipeline or "pipeline" if _usual(model) and len(vaes) == 1 else "pipeline"


def _notes(plan: Plan) -> list[str]:
    """Notes on weights and encoders, a line each."""
    model = plan.request.model
    known, notes = repositories(model.name), []
    if known:
        gate = before_download(known[0])
        notes += [f"{download(known[0])}{f' # {gate}' if gate else ''}"]
    if _weights(plan) is None:
        why = "" if plan.request.from_scratch else ": no published ones are known; set model.init_from to others"
        notes.append(f"It starts from random weights{why}.")
    elif isinstance(objective_of(model.spec, None), FlowMatchingSpec) and model.name not in PUBLISHED:
        notes.append(f"The shift that {model.name} was trained with is unknown: objective.shift is 1.")
    if model.text is not None and not model.extractable:
        notes.append(_OTHER_TEXT.format(model.spec.class_name, model.text.encoder))
    if model.unverified and not known:
        notes.append(f"Not verified for {model.name}: {model.unverified}.")
    if _vae_lent(model):
        notes.append(f"The plan assumes {model.vae.name}: the VAE of {model.pipeline} is unknown or missing.")
    if model.pipeline is None and not _usual(model):
        vae = model.vae
        states = "" if model.text is None else f", and the text encoder states of width {model.text.dim}"
        notes.append(
            f"The VAE must give {vae.latent_channels} channels and {vae.downsample} × {vae.downsample} pixels a "
            f"latent{states}:"
        )
        notes.append(f"the catalogue has no such encoders for {model.spec.class_name}.")
    return notes


def _vae_lent(model: CatalogModel) -> bool:
    """Whether the plan assumes another VAE than that of the model's own folder."""
    return model.pipeline is not None and model.vae.source != str(Path(model.pipeline) / "vae" / CONFIG)


def _usual(model: CatalogModel) -> bool:
    """Whether the catalogue has a model with the same class, VAE and width of text."""
    return any(
        each.spec.class_name == model.spec.class_name
        and each.vae == model.vae
        and (each.text and each.text.dim) == (model.text and model.text.dim)
        for each in models()
    )


WIDTH = 78
_MEET = f"timeout={TrainConfig.model_fields['timeout'].default:g}"
"""How long torchrun waits for other machines: as long as bigdit's processes, in place of 15 minutes."""
_ALONE = ("--standalone", "--multi_gpu", "--use_deepspeed")  # options without a value


class Command(NamedTuple):
    """A command line and its purpose."""

    comment: str
    words: tuple[str, ...]

    def lines(self, width: int = WIDTH) -> list[str]:
        """The command for a shell, broken into lines of at most `width` between words."""
        lines, line = [], ""
        for part in self._parts():
            if line and len(line) + len(part) + 3 > width:
                lines.append(f"{line} \\")
                line = f"    {part}"
            else:
                line = f"{line} {part}" if line else part
        return [*lines, line]

    def _parts(self) -> Iterator[str]:
        """The words quoted for a shell, an option with its value."""
        words = iter([*self.words, ""])
        word = next(words)
        while word:
            after = next(words)
            takes_value = word.startswith("--") and after and not after.startswith("--") and word not in _ALONE
            yield f"{word} {_quoted(after)}" if takes_value else _quoted(word)
            word = next(words) if takes_value else after


def obstacle(plan: Plan) -> str | None:
    """Why the plan cannot be run; None if it can."""
    if not plan.fits:
        return "it does not fit"
    if plan.request.model.training_obstacle is not None:
        return plan.request.model.training_obstacle
    begins = plan.request.model.first_frame or takes_first_frame(plan.request.model.spec)
    if plan.chosen.strategy.features == "online" and begins:
        return "strategy.features online cannot give the first frame that the model needs"
    if plan.chosen.strategy.features == "online" and plan.batch.references:
        return "strategy.features online cannot give the images that the model edits"
    if plan.chosen.strategy.features == "online" and fills(plan.request.model.spec):
        return "strategy.features online cannot give the masked images that the model paints"
    return None


def commands(plan: Plan, folder: Path) -> list[Command]:
    """The commands that encode and train with the plan in `folder`, the simplest first."""
    known = skeleton(plan) is not None
    strategy, config = plan.chosen.strategy, folder / RUN if known else Path(RUN)
    machines = plan.request.cluster.nodes
    spread = machines, strategy.world_size // machines
    found = []
    if known and plan.request.model.extractable and strategy.features == "cached":
        extract = ("bigdit", "extract", "--config", str(config))
        what = f"{samples(plan)}{'' if plan.request.model.text is None else ' and captions'}"
        found.append(Command(f"once, to encode {what}", extract))
    train, where = ["bigdit", "train", "--config", str(config)], "this machine"
    if machines > 1:
        train += ["--nodes", str(machines), "--node-rank", "$NODE_RANK", "--head", "$HEAD"]
        where = f"each of {machines} machines: NODE_RANK 0 to {machines - 1}, HEAD the address of the first"
    found.append(Command(f"on {where}; the same command resumes", tuple(train)))
    if strategy.engine == "single":
        found.append(Command("or", ("python", *entry(), *_arguments(config))))
    else:
        sharded_by_deepspeed = strategy.engine == "deepspeed"
        found.append((_deepspeed if sharded_by_deepspeed else _torchrun)(config, *spread))
        if machines == 1:
            found.append(_accelerate(config, spread[1], "--use_deepspeed" if sharded_by_deepspeed else "--multi_gpu"))
    return found + _sbatch(plan, config, *spread)


_JOB_HOURS, _GRACE_S = 24, 240
"""The hours that launch/slurm/train.sbatch requests, and its default GRACE."""


def _sbatch(plan: Plan, config: Path, machines: int, processes: int) -> list[Command]:
    """SLURM's command, if the repository has the job's file.

    The job requests the hours of the whole run, at most a day; then it is queued again. It gets a signal before its
    end: the time of a step, a save and a minute.
    """
    if entry() != ("launch/train.py",):
        return []
    step = plan.chosen.step.seconds.high
    hours = min(_JOB_HOURS, math.ceil((_steps(plan) * step + _save_seconds(plan)) / HOUR))
    each = str(processes)
    words = ["sbatch", "--nodes", str(machines), "--ntasks-per-node", each, "--gpus-per-node", each]
    words += ["--time", f"{hours}:00:00"]
    if (grace := math.ceil(step + _save_seconds(plan))) > _GRACE_S:
        words += ["--signal", f"USR1@{grace + 60}", "--export", f"ALL,GRACE={grace}"]
    return [Command("or under SLURM", (*words, "launch/slurm/train.sbatch", str(config)))]


def _deepspeed(config: Path, machines: int, processes: int) -> Command:
    arguments = *entry("--module"), *_arguments(config)
    if machines == 1:
        return Command("or by DeepSpeed's launcher", ("deepspeed", "--num_gpus", str(processes), *arguments))
    comment = f"or on the first machine, with {machines} lines `host slots={processes}` in hostfile"
    return Command(comment, ("deepspeed", "--hostfile", "hostfile", *arguments))


def _torchrun(config: Path, machines: int, processes: int) -> Command:
    each, train = ("--nproc-per-node", str(processes)), (*entry(), *_arguments(config))
    if machines == 1:
        return Command("or by torchrun", ("torchrun", "--standalone", *each, *train))
    place = ("--node-rank", "$NODE_RANK", "--master-addr", "$HEAD", "--master-port", str(PORT), "--rdzv-conf", _MEET)
    return Command("or on each by torchrun", ("torchrun", "--nnodes", str(machines), *each, *place, *train))


def _accelerate(config: Path, processes: int, kind: str) -> Command:
    words = ("accelerate", "launch", kind, "--num_machines", "1", "--num_processes", str(processes))
    return Command("or by accelerate", (*words, *entry(), *_arguments(config)))


def _arguments(config: Path) -> tuple[str, ...]:
    return "--config", str(config)


def _quoted(word: str) -> str:
    return word if word.startswith("$") else shlex.quote(word)
