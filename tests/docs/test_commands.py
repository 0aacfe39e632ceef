"""Every command of README and docs/ does what the page says. The table in docs/contributing.md says how each is
tried, and why."""

import re
import shlex
from dataclasses import dataclass

import pytest
import typer
from carried import FIRST
from commands import DIGITS, ROOT, in_process, run_command
from pipeline_folders import pipeline_folder
from reader import (
    RECIPES,
    classes_folder,
    ddpm_folder,
    first_frames_folder,
    planned_folder,
    reader_folder,
    run_there,
    videos_folder,
)
from reference import commands

from bigdit.config.stages import load_run
from bigdit.recipes import names, recipe

PAGES = [FIRST, *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))]
GOLDEN = ROOT / "tests/golden/plan-sana-1600m-a40.txt"
FENCE = re.compile(r"^```(.*?)$\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"console", "text", "yaml"}
OURS = dict(commands())
OF_RECIPES = {line: name for name in names() for line in recipe(name).commands}
USAGE = typer.BadParameter.__base__  # from typer's own copy of click


@dataclass(frozen=True)
class Shown:
    """A page's command, without variables that are set for it, and the output that the page shows."""

    page: str
    text: str
    output: str

    @property
    def words(self):
        words = shlex.split(self.text, comments=True)
        return [word for index, word in enumerate(words) if index or not re.match(r"[A-Z_]+=", word)]

    @property
    def options(self):
        """The options of a bigdit command, after its name; and the name."""
        words = self.words[1:]
        name = next(name for name in OURS if words[: len(name.split())] == name.split())
        return name, words[len(name.split()) :]


def shown(page, text):
    """A page's commands: behind `$ `, continued by a backslash, each with the lines after it."""
    for language, block in FENCE.findall(text):
        if language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command = re.match(r"(?:.*\\\n)*.*\n", part)[0]
                yield Shown(page, command.replace("\\\n", " ").strip(), part[len(command) :])


def tried_by():
    """How each kind of command is tried, by its beginning: contributing.md's table."""
    rows = re.findall(r"^\| `(.+?)` \| (\w+) \| (.+) \|$", (ROOT / "docs/contributing.md").read_text(), re.MULTILINE)
    assert len({start for start, _, _ in rows}) == len(rows)
    return {start: how for start, how, _ in rows}


def beginning(command, starts):
    """The longest matching beginning, or None."""
    words = command.words
    fitting = [start for start in starts if words[: len(shlex.split(start))] == shlex.split(start)]
    return max(fitting, key=len, default=None)


ALL = [command for page in PAGES for command in shown(page, (ROOT / page).read_text())]


def agrees(output, printed):
    """Whether a page's output is the printed one. A line of … stands for any lines."""
    parts = re.split(r"^…\n", output, flags=re.MULTILINE)
    return re.fullmatch(r"(?:.*\n)*?".join(map(re.escape, parts)), printed) is not None


EXTRACT, TRAIN = "bigdit extract --config my.yaml", "bigdit train --config my.yaml"


@pytest.fixture(scope="module")
def reader(tmp_path_factory, images):
    """The folder of a reader who has extracted and trained, as pages say, and the results of these two commands."""
    return done_in(reader_folder(tmp_path_factory.mktemp("docs") / "reader", images), EXTRACT, TRAIN)


@pytest.fixture(scope="module")
def ddpm(reader):
    return done_in(ddpm_folder(reader[0].with_name("ddpm"), reader[0]), TRAIN)


@pytest.fixture(scope="module")
def planned(reader):
    return done_in(planned_folder(reader[0].with_name("planned"), reader[0]))


@pytest.fixture(scope="module")
def classes(tmp_path_factory, images):
    return done_in(classes_folder(tmp_path_factory.mktemp("docs") / "classes", images), EXTRACT, TRAIN)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return done_in(videos_folder(tmp_path_factory.mktemp("docs") / "videos"), EXTRACT, TRAIN)


@pytest.fixture(scope="module")
def first_frames(tmp_path_factory):
    return done_in(first_frames_folder(tmp_path_factory.mktemp("docs") / "first-frames"), EXTRACT, TRAIN)


def done_in(folder, *before):
    """A reader's folder, and the results of the commands that run there first."""
    return folder, {text: run_there(folder, shlex.split(text)) for text in before}


OTHERS = {
    **{"--sampler": "ddpm", "plans/sana/run.yaml": "planned", "plans/flux/run.yaml": "planned", "--label": "classes"},
    **{"--image": "first_frames", "33x480x832": "videos"},
}
"""Readers whose my.yaml is another run, by the first word of theirs."""


BRIEFLY = {"sample": ("--steps", "1")}
"""Options for a command that repeats the same work."""
SMALL = {"33x480x832": "11x32x32"}
"""Sizes of tiny runs in the place of a page's, which tests/test_recipes.py generates."""


def reading(command, found):
    """Run it in the folder of a reader with tiny runs of the digits. It must succeed."""
    folder, done_before = found
    assert {*done_before} <= {each.text for each in ALL}
    assert all(done.returncode == 0 for done in done_before.values()), done_before
    words = [*(SMALL.get(word, word) for word in command.words), *BRIEFLY.get(command.options[0], ())]
    done = done_before.get(command.text) or run_there(folder, words)
    assert done.returncode == 0, done.stderr


def run(command, tmp_path):
    """Run it. It must print what the page shows."""
    own = {"recipe copy": ["--out", tmp_path]}
    name, options = command.options
    done = in_process(*name.split(), *options, *own.get(name, []))
    assert done.returncode == 0, done.stderr
    if command.output:
        assert agrees(command.output, done.stdout)


def parsed(command, _):
    """bigdit's own parser accepts it, and its overrides are keys of a run."""
    name, options = command.options
    values = OURS[name].make_context(name, options).params
    assert values
    load_run(DIGITS, values.get("overrides") or [])
    return values


def asked(command, tmp_path):
    """Parse it, and check its model, GPU, strategy and sizes, as before it runs. Another test has seen the first
    plan's output."""
    from bigdit import catalog
    from bigdit.config.strategy_text import parse_strategy
    from bigdit.search.resolve import resolve_request

    pipeline_folder(tmp_path / "models/mine", "Efficient-Large-Model/Sana_1600M_1024px_diffusers")
    values = parsed(command, tmp_path)
    if command.options[0] == "plan":
        own = ("out", "also_gpus", "config")
        if values.get("config"):  # a reader has its model and sizes
            values |= {"model": "sana-1600m"}
        resolve_request(**{key: value for key, value in values.items() if value and key not in own})
    else:
        catalog.find_model(values["model"]), catalog.resolve_gpu(values["gpu"])
        assert [parse_strategy(text.split()) for text in values["strategy"]]
    if command.output:
        assert agrees(command.output, GOLDEN.read_text())


def launched(command, _):
    """The launcher's own parser accepts it, and launch/train.py's accepts the rest."""
    from accelerate.commands.launch import launch_command_parser
    from deepspeed.launcher.runner import parse_args
    from torch.distributed.run import get_args_parser

    from bigdit.train.__main__ import parse

    launcher, *words = command.words
    if launcher == "deepspeed":
        found = parse_args(words)
        script, own = found.user_script, found.user_args
    else:
        parser = {"torchrun": get_args_parser, "accelerate": launch_command_parser}[launcher]()
        found = parser.parse_args(words[1:] if launcher == "accelerate" else words)
        script, own = found.training_script, found.training_script_args
    assert (ROOT / script).is_file()
    load_run(DIGITS, parse(own).set)


def submitted(command, _):
    """The script exists, and bash parses it. The rest is for `bigdit extract` or launch/train.py."""
    from bigdit.train.__main__ import parse

    at = next(index for index, word in enumerate(command.words) if word.endswith(".sbatch"))
    script, config, *options = command.words[at:]
    assert run_command("bash", "-n", script).returncode == 0
    options = ["--config", config, *options]
    if "bigdit extract" in (ROOT / script).read_text():
        assert OURS["extract"].make_context("extract", options).params
    else:
        assert parse(options)


def listed(command, _):
    """It is a recipe's own command, which tests/test_recipes.py runs at full size."""
    assert command.text in OF_RECIPES


def downloaded(command, _):
    """`hf` has the options, and the repository is a recipe's."""
    assert command.text in OF_RECIPES
    done = run_command("hf", "download", "--help")
    assert all(word in done.stdout for word in command.words if word.startswith("--"))


def made(command, _):
    """make has the target."""
    assert run_command("make", "--dry-run", *command.words[1:]).returncode == 0


TRIED = {way.__name__: way for way in (run, reading, listed, parsed, asked, launched, submitted, downloaded, made)}
WAYS = tried_by()


def way_of(command):
    """How the command is tried, or None if the table has no line for it."""
    found = WAYS.get(beginning(command, WAYS))
    recipe_name = OF_RECIPES.get(command.text)
    return "listed" if found == "reading" and recipe_name and recipe_name not in RECIPES else found


READ = [command for command in ALL if way_of(command) == "reading"]


def named(command):
    return f"{command.page}: {command.text[:60]}"


@pytest.mark.parametrize("command", [command for command in ALL if command not in READ], ids=named)
def test_a_command_does_what_stands_there(command, tmp_path, monkeypatch):
    way = way_of(command)
    assert way is not None, f"docs/contributing.md does not say how {command.text!r} is tried"
    monkeypatch.chdir(tmp_path)
    TRIED[way](command, tmp_path)
    assert not command.output or way in ("run", "asked"), "nothing holds this output"


@pytest.mark.xdist_group("reader")  # one worker has the folder, and the commands have an order
@pytest.mark.parametrize("command", READ, ids=named)
def test_a_reader_gets_what_stands_there(command, request):
    assert not command.output, "nothing holds this output"
    who = next((OTHERS[word] for word in command.words if word in OTHERS), "reader")
    reading(command, request.getfixturevalue(who))


def test_each_row_of_the_table_is_of_some_command():
    assert set(WAYS) == {beginning(command, WAYS) for command in ALL}
    assert {way_of(command) for command in ALL} == set(TRIED)


@pytest.mark.parametrize("page", PAGES)
def test_commands_stand_where_they_are_found(page):
    """No command hides in a block of another kind, or in an indented one. Commands within a line have real options."""
    text = (ROOT / page).read_text()
    blocks = FENCE.findall(text)
    assert {language for language, _ in blocks} <= LANGUAGES
    assert not [
        block for language, block in blocks if language != "console" and re.search(r"^(\$ |bigdit )", block, re.M)
    ]
    prose = FENCE.sub("", text)
    assert not re.search(r"\n\n {4,}(\$ )?(bigdit|python|make|pip)\b", prose)
    for within in (part for each in re.findall(r"`bigdit ([a-z][^`]*)`", prose) for part in each.split(" -- bigdit ")):
        fitting = [
            command for name, command in OURS.items() if f"{within} ".startswith((f"{name} ", f"{name.split()[0]} "))
        ]
        known = {option for command in fitting for each in command.params for option in each.opts}
        assert fitting, within
        assert set(re.findall(r"(?<= )--[\w-]+", within)) <= known, within
        assert not stray(within), f"{within}: takes no such word; name the option"


def stray(within):
    """What no option or argument of a sentence's command accepts. Its last words may be missing, but not an
    option's."""
    words = shlex.split(within)
    name = max((name for name in OURS if words[: len(name.split())] == name.split()), key=len, default=None)
    if name is None:
        return []  # for several commands, such as `bigdit bench`
    command, rest = OURS[name], words[len(name.split()) :]
    arguments = sum(each.param_type_name == "argument" for each in command.params)
    if "--strategy" in rest and "--model" not in rest:
        return ["--strategy, without --model"]
    try:
        _, left, _ = command.make_parser(command.context_class(command)).parse_args(list(rest))
    except USAGE:
        return []  # an option without its value
    return left[arguments:]


def test_a_word_that_no_option_takes_is_stray():
    assert stray("plan wan2.1-t2v-1.3b --gpu a40") == ["wan2.1-t2v-1.3b"]
    assert stray("profile --strategy single") == ["--strategy, without --model"]
    assert not stray("plan --model wan2.1-t2v-1.3b --gpu …")
    assert not stray("features info runs/my --json")
    assert not stray("plan --out")


@pytest.mark.parametrize(
    ("output", "printed", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n…\nc\n", "a\nb\nc\n", True),
        ("a\n…\n", "a\nb\nc\n", True),
        ("b\n", "a\nb\n", False),
        ("a\n", "a\nb\n", False),
        ("a\n…\nd\n", "a\nb\nc\n", False),
        ("c\n…\na\n", "a\nb\nc\n", False),
    ],
)
def test_outputs_are_compared(output, printed, same):
    assert agrees(output, printed) is same


def test_a_command_goes_over_lines_and_ends_where_its_output_begins():
    text = "```console\n$ A=b bigdit plan \\\n    --gpu a40  # why\nFITS\n$ make\n```\n```text\n$ no\n```\n"
    first, second = shown("page", text)
    assert first.words == ["bigdit", "plan", "--gpu", "a40"]
    assert (first.output, second.text) == ("FITS\n", "make")
