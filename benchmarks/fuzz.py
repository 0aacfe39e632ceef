"""Check that bigdit answers whatever a person writes: random configs, overrides and options, by the commands' own
functions.

    python benchmarks/fuzz.py [--examples 10000] [--seed 0]

Each input must end with 0, 1 or 2, within the time limit and without a traceback. With 1 it must say why. `plan`,
`profile` and `bench` end once their request is known to be sound, since an answer takes seconds and reads nothing
random. Nothing trains, and no worker starts.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from bigdit.cli import main
from bigdit.config.strategy_text import PRESETS
from bigdit.errors import UserError

ROOT = Path(__file__).parents[1]
LIMIT_S = 60.0
"""For one input, on a machine that also does other work."""
MEMORY = 24 * 2**30
"""Address space of this process, so that an input that is too large fails by an error, and not by the kernel's
killer."""
SOUND = "this request is sound"

RECIPE = yaml.safe_load((ROOT / "launch/recipes/digits.yaml").read_text())
RECIPE["strategy"] |= {"engine": "single", "world_size": 1, "ds_config": None}
DOCUMENT = json.loads((ROOT / "ds_configs/zero3_offload.json").read_text())
# Keys that the recipe leaves out.
MORE_KEYS = (
    "model.name", "model.path", "model.init_from", "data.caption_dropout", "strategy.read_ahead_steps", "data.reader",
    "data.remote_cache", "encoders.device", "encoders.batch_size", "encoders.text.stored", "objective.shift",
    "strategy.optimizer.eps", "strategy.optimizer.weight_decay", "strategy.optimizer.implementation",
    "strategy.optimizer.decayed", "strategy.grad_accum_steps", "strategy.ema", "strategy.ema.decay",
    "strategy.ema.power", "strategy.lora", "strategy.lora.rank", "strategy.checkpointed_blocks",
    "strategy.checkpointing", "strategy.checkpointed_segments.every", "train.grace", "strategy.offload_activations",
    "strategy.blocks_to_swap",
    "strategy.optimizer_in_backward", "train.decay_steps", "train.min_lr", "train.timeout", "strategy.dp_replicate",
    "strategy.ds_config", "strategy.cpu_offload", "strategy.features", "plan", "train.epochs",
)  # fmt: skip
WORDS = (
    "auto", "all", "none", "adamw", "came", "bf16", "fp16", "fp32", "fsdp2", "deepspeed", "single", "zero2", "identity",
    "sana-600m", "sana-1600m", "flux.1-dev", "wan2.1-t2v-1.3b", "sdxl", "a40", "h100", "4090", "a100-80g-sxm:3g.40gb",
    "1024", "480x832", "512,1024", "8x8", "aspect", "24GB", "45416MiB", "30M", "1.5k", "1e-4", "cpu", "cuda", "online",
    "", " ", ".", "..", "/", "~", "run.yaml", "ds.json", "/dev/null", "/proc/self/mem", "no/such", "\x00", "\x1b[31m",
    "²", "٣", "1" * 400, "x" * 5000, "true", "null", "[", "{", "*a", "&a [*a]", "!!python/object:os.system", "{{}}",
    "-1", "--help",
)  # fmt: skip
INTEGERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 8, 16, 64, 4096, 10**6, 2**31, 2**63, 2**64 - 1]) | st.integers(-9, 99)
FLOATS = st.sampled_from([0.0, -0.5, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")]) | st.floats()
TEXTS = st.sampled_from(WORDS) | st.text(max_size=12)
SCALARS = st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS
JUNK = SCALARS | st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(0, 3), inner, max_size=3),
    max_leaves=6,
)
OTHERS = ("nothing", "a folder", "a link to itself")
"""What may lie where a file should be."""


@dataclass
class Written:
    """What a person types, and the files beside it."""

    arguments: list[str]
    files: dict[str, str] = field(default_factory=dict)


def places(document: Any, key: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a document, sections too."""
    yield key
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in inner:
        yield from places(value, (*key, name))


@st.composite
def changed(draw: st.DrawFn, sound: Any) -> Any:
    """The document with a few values changed, keys misspelt, or left out."""
    document = copy.deepcopy(sound)
    for _ in range(draw(st.integers(0, 3))):
        *parents, last = draw(st.sampled_from([key for key in places(document) if key] or [(None,)]))
        if last is None:
            return document
        node = document
        for parent in parents:
            node = node[parent]
        how = draw(st.sampled_from(["value", "value", "missing", "misspelt"]))
        value = node[last] if how == "misspelt" else draw(JUNK)
        if how == "value":
            node[last] = value
        else:
            del node[last]
            if how == "misspelt" and isinstance(node, dict):
                node[str(last)[:-1]] = value
    return document


@st.composite
def texts(draw: st.DrawFn, sound: Any, write: Any) -> str:
    """A changed document as text, sometimes damaged, or something else in its place."""
    text: str = write(draw(changed(sound)))
    if draw(st.integers(0, 9)):
        return text
    at = draw(st.integers(0, len(text)))
    flipped = chr(ord(text[at]) ^ 1 << draw(st.integers(0, 6))) if at < len(text) else "\udcff"  # not UTF-8
    rests = (draw(TEXTS) + text[at:], flipped + text[at + 1 :], "\0" * len(text[at : at + 512]) + text[at + 512 :])
    damaged = [text[:at] + rest for rest in ("", *rests)]
    return draw(st.sampled_from([*damaged, text + text, draw(TEXTS), *OTHERS]))


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _json(value: Any) -> str:
    return json.dumps(value, default=str, skipkeys=True)


KEYS = tuple(".".join(map(str, key)) for key in places(RECIPE) if key and not any(isinstance(k, int) for k in key))
OVERRIDES = st.builds("{}={}".format, st.sampled_from(KEYS + MORE_KEYS), JUNK.map(_yaml) | TEXTS) | TEXTS


def options(*known: str) -> st.SearchStrategy[list[str]]:
    """A few options with a value for each."""
    values = TEXTS | INTEGERS.map(str) | FLOATS.map(str)
    pairs = st.tuples(st.sampled_from(known), values)
    return st.lists(pairs, max_size=4).map(lambda some: [part for pair in some for part in pair])


@st.composite
def train(draw: st.DrawFn) -> Written:
    files = {"run.yaml": draw(texts(RECIPE, yaml.safe_dump)), "ds.json": draw(texts(DOCUMENT, _json))}
    overrides = [part for each in draw(st.lists(OVERRIDES, max_size=3)) for part in ("--set", each)]
    document = draw(st.sampled_from([[], [], ["--ds-config", "ds.json"]]))
    more = draw(options("--grace", "--ds-config")) if draw(st.integers(0, 3)) == 0 else []
    return Written(["train", "--config", "run.yaml", *overrides, *document, *more, "--dry-run"], files)


@st.composite
def plan(draw: st.DrawFn) -> Written:
    model, gpu = (draw(st.sampled_from(names) | TEXTS) for names in (("sana-600m", "wan2.1-t2v-1.3b"), ("a40", "h100")))
    more = options(
        "--gpu-memory", "--gpus", "--gpus-per-node", "--network", "--host-memory", "--resolution", "--buckets",
        "--frames", "--epochs", "--reserve",
        "--global-batch", "--images", "--price", "--receipts", "--engine", "--optimizer", "--precision", "--ema",
        "--checkpointed-blocks", "--micro-batch", "--lora", "--features",
    )  # fmt: skip
    return Written(["plan", "--model", model, "--gpu", gpu, *draw(more)], {"config.json": draw(texts(MODEL, _json))})


MODEL = {"_class_name": "SanaTransformer2DModel", **RECIPE["model"]["kwargs"]}


@st.composite
def profile(draw: st.DrawFn) -> Written:
    names = [*PRESETS, "world_size", "micro_batch_size", "optimizer.name", "optimizer.lr", "precision", "lora.rank",
             "ds_config.zero_optimization.stage", "checkpointed_blocks", "dp_replicate", "ema.device"]  # fmt: skip
    one = st.builds("{}={}".format, st.sampled_from(names), JUNK.map(_yaml)) | st.sampled_from(list(PRESETS)) | TEXTS
    strategy = draw(st.lists(one, min_size=1, max_size=3).map(",".join))
    model = draw(st.sampled_from(["sana-600m", "config.json", "."]) | TEXTS)
    more = draw(options("--gpu", "--resolution", "--frames", "--timeout"))
    files = {"config.json": draw(texts(MODEL, _json)), "ds.json": draw(texts(DOCUMENT, _json))}
    return Written(["profile", "--model", model, "--strategy", strategy, *more], files)


@st.composite
def bench(draw: st.DrawFn) -> Written:
    model, gpu = (draw(st.sampled_from(names) | TEXTS) for names in (("sana-600m", "wan2.1-t2v-1.3b"), ("a40", "auto")))
    more = options("--micro-batch", "--strategy", "--resolution", "--frames", "--limit", "--steps")
    return Written(["bench", "memory", "--model", model, "--gpu", gpu, *draw(more)])


@st.composite
def step(draw: st.DrawFn) -> Written:
    overrides = [part for each in draw(st.lists(OVERRIDES, max_size=2)) for part in ("--set", each)]
    written = {"run.yaml": draw(texts(RECIPE, yaml.safe_dump))}
    return Written(["bench", "step", "--config", "run.yaml", *overrides, *draw(options("--steps"))], written)


@st.composite
def others(draw: st.DrawFn) -> Written:
    command, known = draw(
        st.sampled_from([
            (["models"], ("--filter",)),
            (["gpus"], ("--filter", "--min-memory")),
            (["features", "info", "store"], ("--json",)),
            (["features", "verify", "store"], ("--workers", "--config", "--set")),
            (["export"], ("--checkpoint", "--out")),
            (["sample", "--checkpoint", "no", "--out", "out"],
             ("--caption", "--captions", "--size", "--steps", "--guidance", "--seed")),
            (["receipts", "list"], ("--receipts",)),
            (["receipts", "compare"], ("--receipts", "--gpu")),
            (["recipe", "show", "sana-1600m-a40"], ("--json",)),
        ])
    )  # fmt: skip
    return Written([*command, *draw(options(*known))], {"store/features.json": draw(texts(RECIPE, _json))})


WRITTEN = st.one_of(train(), train(), plan(), profile(), bench(), step(), others())


class Hung(BaseException):
    """An input that was not answered in time."""


@contextlib.contextmanager
def unanswered() -> Iterator[None]:
    """Replace the work of a sound request, which takes seconds, by a note that the request is sound."""
    sound = UserError(SOUND)
    with (
        patch("bigdit.search.answer.make_plan", side_effect=sound),
        patch("bigdit.profile.gpus.EmulatedGpus", side_effect=sound),
        patch("bigdit.bench.memory.MemoryBenchmark.curves", side_effect=sound),
        patch("bigdit.bench.step.bench_step", side_effect=sound),
    ):
        yield


def put(path: Path, text: str) -> None:
    """Write a file, or what is in its place."""
    path.parent.mkdir(exist_ok=True)
    if text == "a folder":
        path.mkdir()
    elif text == "a link to itself":
        path.symlink_to(path.name)
    elif text != "nothing":
        path.write_bytes(text.encode(errors="surrogateescape"))


def check(written: Written, limit: float = LIMIT_S) -> int:
    """Run one input. Returns the exit status. Raises AssertionError for a bad answer, or one that takes `limit`
    seconds."""

    def hang(*_: object) -> None:
        raise Hung

    out, err, status = io.StringIO(), io.StringIO(), None
    before = signal.signal(signal.SIGALRM, hang)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), unanswered():
        for name, text in written.files.items():
            put(Path(name), text)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(written.arguments)
        except SystemExit as ended:
            status = ended.code
        except Hung:
            raise AssertionError(f"no answer in {limit} s: {written}") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    said = err.getvalue()
    assert status in (0, 1, 2), f"status {status}: {written}\n{said}"
    assert "Traceback" not in said, f"{written}\n{said}"
    assert status != 1 or "rror: " in said or "damaged" in out.getvalue(), f"ends with 1 in silence: {written}\n{said}"
    return int(status)


def fuzz(examples: int, seed: int | None = None) -> Counter[int]:
    """Check this many inputs. Returns how many ended with each status. Without a seed they are the same each time."""
    found: Counter[int] = Counter()
    sound = Written(["train", "--config", "run.yaml", "--dry-run"], {"run.yaml": yaml.safe_dump(RECIPE)})
    assert check(sound, limit=600) == 0  # imports torch first

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(WRITTEN)
    def each(written: Written) -> None:
        found[check(written)] += 1

    (each if seed is None else seeded(seed)(each))()
    return found


def run() -> int:
    """Fuzz, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ["COLUMNS"] = "80"
    began = time.monotonic()
    found = fuzz(asked.examples, asked.seed)
    ends = ", ".join(f"{count} with {status}" for status, count in sorted(found.items()))
    print(f"{sum(found.values())} inputs in {time.monotonic() - began:.0f} s: {ends}; no traceback, no hang")
    return 0


if __name__ == "__main__":
    sys.exit(run())
