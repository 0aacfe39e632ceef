"""The command line answers fast, and says clearly what is wrong with its input."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import BIN, DIGITS, ROOT, SINGLE, bigdit, in_process, run_command, with_set
from running import until

from bigdit.app import app
from bigdit.cli import main
from bigdit.commands import features
from bigdit.config.check import SCHEMA
from bigdit.store.schema import FILE

COMMANDS = ("plan", "extract", "train", "sample", "bench", "models", "gpus", "doctor")


def best_of_five(*arguments):
    """A command's answer, and its CPU-seconds: waiting for a core of a busy machine does not count."""
    took = []
    for _ in range(5):
        before = os.times()
        done = bigdit(*arguments, timeout=60)
        after = os.times()
        took.append(sum(after[2:4]) - sum(before[2:4]))  # of children that have ended
    return done, min(took)


def test_help_answers_at_once():
    """Under 0.3 s of a core."""
    done, took = best_of_five("--help")
    assert all(command in done.stdout for command in COMMANDS)
    assert took < 0.3


def test_help_does_not_import_torch():
    code = "import sys, bigdit.app; sys.exit(any(name in sys.modules for name in ('torch', 'pydantic', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_what_is_kept_of_a_plan_is_shown_without_what_makes_plans():
    code = "import sys, bigdit.search.answer, bigdit.search.resolve, bigdit.report.plan; "
    code += "sys.exit(any(name in sys.modules for name in ('numpy', 'bigdit.search.planner')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = in_process(command, "--help")
    assert done.returncode == 0
    assert "Options:" in done.stdout


@pytest.mark.parametrize("columns", ["50", "80", "140"])
@pytest.mark.parametrize("group", [[], ["features"]])
def test_help_is_as_wide_as_the_terminal_and_its_summaries_are_whole(columns, group):
    text = in_process(*group, "--help", COLUMNS=columns).stdout
    lengths = [len(line) for line in text.splitlines()]
    assert 0.8 * min(int(columns), 100) < max(lengths) <= int(columns)
    summaries = "".join(text.split("Commands:")[1].split())  # a hyphen ends a line
    commands = features.app if group else app
    for command in commands.registered_commands:
        summary = command.callback.__doc__.split("\n\n")[0]
        assert "".join(summary.split()) in summaries
    assert "..." not in summaries


@pytest.mark.parametrize("arguments", [["models"], ["gpus", "--filter", "ampere"]])
def test_pipes_get_no_trailing_blanks(arguments):
    lines = in_process(*arguments).stdout.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []


def on_a_terminal(code, **environment):
    """What a Python program writes to a terminal."""
    leader, follower = os.openpty()
    with open(leader, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={key: value for key, value in os.environ.items() if key != "NO_COLOR"}
            | {"TERM": "xterm"}
            | environment,
        )
        os.close(follower)
        written = b""
        with contextlib.suppress(OSError):  # how Linux reports that the other end is closed
            while found := screen.read(4096):
                written += found
        assert process.wait(timeout=60) == 0
    return written


SHOWN = """
import time
from bigdit import log
with log.err.status("planning"):
    time.sleep(0.3)
with log.progress("encoding", 2, "parts") as advance:
    advance(2)
log.out.print("[bold]done[/bold]")
"""


def test_no_color_is_without_control_codes():
    assert b"\x1b[?25l" in on_a_terminal(SHOWN)  # the cursor is hidden while a line is redrawn
    plain = on_a_terminal(SHOWN, NO_COLOR="1")
    assert b"\x1b" not in plain
    assert b"done" in plain


def test_training_finds_out_about_a_missing_store_at_once(tmp_path):
    """Within a second of a core, the time of importing torch alone, by any launcher."""
    line = f"error: data.features: {tmp_path} holds no latents; `bigdit extract --config RUN.yaml` makes them\n"
    arguments = ("--config", DIGITS, *with_set([*SINGLE, f"data.features={tmp_path}", f"output={tmp_path / 'run'}"]))
    done, took = best_of_five("train", *arguments)
    assert (done.returncode, done.stderr) == (1, line)
    assert took < 1
    assert SCHEMA == FILE
    assert not (tmp_path / "run").exists()
    code = (
        "import sys; from bigdit.errors import guard; from bigdit.train.__main__ import main; "
        "guard(lambda: main(sys.argv[1:])); sys.exit('torch' in sys.modules)"
    )
    done = run_command(sys.executable, "-c", code, *arguments)
    assert (done.returncode, done.stderr) == (0, line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--moel", "x"], "error: no such option: --moel"),
        (["plan", "--model", "sana-1600m"], "error: missing option '--gpu' (`bigdit plan --help` lists all)\n"),
        (
            ["plan", "--model", "x", "--gpu"],
            "error: option '--gpu' requires an argument (`bigdit plan --help` lists all)",
        ),
        (["bench", "step", "--set"], "error: option '--set' requires an argument (`bigdit bench step --help` lists"),
        (["plan", "--resolution"], "error: option '--resolution' requires an argument"),
        (["plann"], "error: no such command 'plann'"),
        (["train", "--config", "none.yaml"], "error: the config none.yaml does not exist"),
        (["train", "--config", "docs"], "error: the config docs is a folder; name a file in it"),
        (["plan", "--micro-batch", "true"], "error: --micro-batch is 'true', and a whole number was expected"),
        (["plan", "--network", "fast"], "error: --network is 'fast', and a number was expected"),
        (
            ["extract", "--config", "none.yaml", "--engine", "foo"],
            "error: --engine is 'foo', which is unknown; known: local, ray, slurm",
        ),
        (
            ["profile", "--model", "dit-s-2", "--plot", "/proc/x.png"],
            "error: --plot: cannot write /proc: No such file or directory; choose another",
        ),
        pytest.param(
            ["receipts", "list", "--receipts", "x" * 300], f"error: {'x' * 200}: File name too long", id="a long path"
        ),
    ],
)
def test_a_wrong_call_ends_with_1(arguments, message):
    done = in_process(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_working_folder_that_is_gone_is_a_line(tmp_path):
    """torch's own libraries do not load there, as a plan's process reported."""
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run_command("sh", "-c", f"cd {gone} && rmdir {gone} && exec {BIN / 'bigdit'} plan --model sana-600m")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the working folder was removed; change to another (cd)\n"
    gone.mkdir()
    helped = run_command("sh", "-c", f"cd {gone} && rmdir {gone} && exec {BIN / 'bigdit'} plan --help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "Usage: bigdit plan" in helped.stdout


def test_a_bug_ends_with_3_and_versions(monkeypatch, capsys):
    from bigdit.errors import EXIT_BUG, guard

    def broken():
        raise RuntimeError("unforeseen")

    assert guard(broken) == EXIT_BUG
    printed = capsys.readouterr().err
    assert "RuntimeError: unforeseen" in printed
    assert "versions: python=" in printed


def test_interrupted_ends_with_130(capsys, monkeypatch):
    """Within a command, and also while it parses its arguments."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("bigdit.catalog.gpus.gpus", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["gpus"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        (("plan", "--model", "sana-600m", "--gpu", "a40", "--micro-batch", "7"), 3),
        (("extract", "--config", DIGITS, "--set", "data.part_size=1"), 4),
    ],
    ids=["plan", "extract"],
)
def test_ctrl_c_says_so_and_no_worker_of_the_command_says_more(arguments, workers, images, tmp_path):
    """As a terminal sends it, to every process of the command's group. A plan's workers are not in that group."""
    places = with_set([f"data.images={images}", f"data.features={tmp_path / 'features'}"])
    with open(tmp_path / "said", "w") as printed:
        command = subprocess.Popen(
            [BIN / "bigdit", *arguments, *(places if "--config" in arguments else ())],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=printed,
            process_group=0,
        )
        # Its workers have started: extracting so few digits takes less than a second.
        until(lambda: len(started_by(command.pid)) >= workers or command.poll() is not None, within=120)
        started = started_by(command.pid)
        assert started
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(60) == 130
    printed = (tmp_path / "said").read_text()
    assert printed.endswith("interrupted\n")
    assert "Traceback" not in printed
    until(lambda: not started & {pid for pid, *_ in processes()}, within=30)


def test_ctrl_c_while_its_first_module_is_imported_says_so():
    code = (
        "import os, signal, sys\n"
        "class Typed:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'bigdit.errors':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Typed())\n"
        "from bigdit.cli import main\n"
        "main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_in_a_finalizer_is_not_dropped():
    """Python prints it there with a traceback, and goes on."""
    code = (
        "import os, signal, time\n"
        "from bigdit.errors import guard\n"
        "class Typed:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.1)\n"
        "def main():\n"
        "    Typed()\n"
        "    time.sleep(60)\n"
        "raise SystemExit(guard(main))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_while_what_was_interrupted_exits_is_no_traceback():
    """In exit handlers, such as torch's, which take seconds."""
    code = (
        "import atexit, os, signal, sys, time\n"
        "def typed(seconds):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(seconds)\n"
        "atexit.register(typed, 60)\n"
        "from bigdit.errors import guard\n"
        "sys.exit(guard(lambda: typed(60)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "interrupted\n")


def test_ctrl_c_while_what_is_done_exits_is_no_traceback():
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.argv = ['bigdit', '--version']\n"
        "from bigdit.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_empty_variable_for_torchs_messages_is_none():
    """With an empty one torch raises AttributeError when it is imported."""
    code = "import sys; from bigdit.errors import guard; sys.exit(guard(lambda: print(__import__('torch').__name__)))"
    everything = {"env": os.environ | {"TORCH_LOGS": ""}, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", code], check=False, **everything)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch\n", "")


def processes():
    """The machine's running processes, with their parents."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z":
            yield int(stat.parent.name), int(parent)


def started_by(pid):
    """What the process has started, and what those have."""
    found, more = set(), {pid}
    while more:
        more = {child for child, parent in processes() if parent in more} - found
        found |= more
    return found


def test_a_reader_that_has_seen_enough_ends_it_in_silence():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {BIN}/bigdit models --json | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[\n", "")


def test_version():
    from bigdit import __version__

    assert in_process("--version").stdout == f"bigdit {__version__}\n"


@pytest.mark.parametrize("command", [("extract",), ("train", "--dry-run")])
def test_a_path_that_exists_beside_the_yaml_alone_is_named(tmp_path, command):
    (tmp_path / "beside-the-yaml").mkdir()
    (tmp_path / "run.yaml").write_text(DIGITS.read_text())
    done = in_process(
        *command, "--config", tmp_path / "run.yaml", *with_set([*SINGLE, "data.images=[beside-the-yaml,docs]"])
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: data.images.0.path: beside-the-yaml does not exist in {ROOT}, and paths are relative to the folder of "
        f"the command; {tmp_path}/beside-the-yaml exists: write that, or run the command in {tmp_path}"
    ]
