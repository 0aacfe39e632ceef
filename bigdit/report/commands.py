"""The commands that run a plan, right for its engine, its GPUs and its machines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bigdit.catalog.conditions import takes_first_frame
from bigdit.checkout import entry
from bigdit.report.skeleton import RUN, skeleton
from bigdit.report.words import samples
from bigdit.search.plan import Plan, record

WIDTH = 78
PORT = 29500
_ALONE = ("--standalone", "--multi_gpu", "--use_deepspeed")  # options without a value


class Command(NamedTuple):
    """What it is for, and the words of the command line."""

    comment: str
    words: tuple[str, ...]

    def lines(self, width: int = WIDTH) -> list[str]:
        """The command for a shell, continued over lines of at most `width` where its words allow it."""
        lines, line = [], ""
        for part in self._parts():
            if line and len(line) + len(part) + 3 > width:
                lines.append(f"{line} \\")
                line = f"    {part}"
            else:
                line = f"{line} {part}" if line else part
        return [*lines, line]

    def _parts(self) -> Iterator[str]:
        """The words as a shell reads them, an option with its value."""
        words = iter([*self.words, ""])
        word = next(words)
        while word:
            after = next(words)
            takes_value = word.startswith("--") and after and not after.startswith("--") and word not in _ALONE
            yield f"{word} {_quoted(after)}" if takes_value else _quoted(word)
            word = next(words) if takes_value else after


def obstacle(plan: Plan) -> str | None:
    """Why there is nothing to run; None where there is."""
    if not plan.fits:
        return "it does not fit"
    if plan.question.model.training_obstacle is not None:
        return plan.question.model.training_obstacle
    if plan.chosen.strategy.features == "online" and takes_first_frame(plan.question.model.spec):
        return "features online have no first frame, which the model begins with"
    return None


def commands(plan: Plan, folder: Path) -> list[Command]:
    """How to encode and to train by the plan that lies in `folder`, the short ways first."""
    known = skeleton(plan) is not None
    recorded, config = record(plan), folder / RUN if known else Path(RUN)
    found, spread = [], recorded.processes_per_node
    if known and plan.question.model.extractable and recorded.strategy.features == "cached":
        extract = ("bigdit", "extract", "--config", str(config))
        what = f"{samples(plan)}{'' if plan.question.model.text is None else ' and captions'}"
        found.append(Command(f"once, to encode {what}", extract))
    if len(spread) == 1:
        train = ("bigdit", "train", "--config", str(config))
        found.append(Command("on this machine; the same command resumes", train))
    if recorded.strategy.engine == "deepspeed":
        found += [_deepspeed(config, spread), *_accelerate(config, spread, "--use_deepspeed")]
    elif recorded.strategy.engine == "fsdp2":
        found += _torchrun(config, spread) + _accelerate(config, spread, "--multi_gpu")
    else:
        found.append(Command("or", ("python", *entry(), *_arguments(config))))
    return found


def _deepspeed(config: Path, spread: Sequence[int]) -> Command:
    arguments = _arguments(config)
    if len(spread) == 1:
        words = ["deepspeed", "--num_gpus", str(spread[0]), *entry("--module"), *arguments]
        return Command("or by DeepSpeed's launcher", tuple(words))
    even = len(set(spread)) == 1
    slots = f"{len(spread)} lines `host slots={spread[0]}`" if even else ", ".join(f"`host slots={n}`" for n in spread)
    words = ["deepspeed", "--hostfile", "hostfile", *entry("--module"), *arguments]
    return Command(f"on the first machine, with {slots} in hostfile", tuple(words))


def _torchrun(config: Path, spread: Sequence[int]) -> list[Command]:
    arguments = (*entry(), *_arguments(config))
    if len(spread) == 1:
        words = ("torchrun", "--standalone", "--nproc-per-node", str(spread[0]), *arguments)
        return [Command("or by torchrun", words)]

    def on(rank: str, processes: int) -> tuple[str, ...]:
        nodes = ("torchrun", "--nnodes", str(len(spread)), "--nproc-per-node", str(processes), "--node-rank", rank)
        return (*nodes, "--master-addr", "$HEAD", "--master-port", str(PORT), *arguments)

    if len(set(spread)) == 1:
        comment = f"on each of {len(spread)} machines: NODE_RANK 0 to {len(spread) - 1}, HEAD the address of the first"
        return [Command(comment, on("$NODE_RANK", spread[0]))]
    return [
        Command(f"on machine {rank}, HEAD being the address of machine 0", on(str(rank), processes))
        for rank, processes in enumerate(spread)
    ]


def _accelerate(config: Path, spread: Sequence[int], kind: str) -> list[Command]:
    """accelerate's launcher of this kind, which starts as many processes on each machine."""
    if len(set(spread)) > 1:
        return []
    words = ["accelerate", "launch", kind, "--num_machines", str(len(spread)), "--num_processes", str(sum(spread))]
    if len(spread) > 1 and kind == "--use_deepspeed":  # else the first would start the others, by pdsh
        words += ["--deepspeed_multinode_launcher", "standard"]
    if len(spread) > 1:
        words += ["--machine_rank", "$NODE_RANK", "--main_process_ip", "$HEAD", "--main_process_port", str(PORT)]
    comment = "or by accelerate" if len(spread) == 1 else "or on each by accelerate"
    return [Command(comment, (*words, *entry(), *_arguments(config)))]


def _arguments(config: Path) -> tuple[str, ...]:
    return "--config", str(config)


def _quoted(word: str) -> str:
    return word if word.startswith("$") else shlex.quote(word)
