"""The package is as ARCHITECTURE.md describes it: no import cycles, and every layer has a docstring. import-linter
checks which layer imports which (setup.cfg)."""

import ast
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import grimp
import pytest
from commands import ROOT

PACKAGE = ROOT / "bigdit"


def circles(imports):
    """The groups of modules that import each other, given {module: imported}. Two modules are in a group if each
    reaches the other."""
    reached = {module: _reached(module, imports) for module in imports}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in imports}
    return [sorted(group) for group in groups if group]


def _reached(module, imports):
    """All modules that an import of this one imports; itself only within a cycle."""
    found, waiting = set(), list(imports[module])
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting.extend(imports[each])
    return found


def named():
    """The layers that import-linter holds, in setup.cfg."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["importlinter:contract:layers"]["layers"].replace(":", " ").split()


def layers():
    """The files whose docstrings describe the layers, and their subfolders."""
    alone = [(ROOT / name.replace(".", "/")).with_suffix(".py") for name in named()]
    return sorted([*PACKAGE.rglob("__init__.py"), *(file for file in alone if file.exists())])


def test_scripts_that_are_asked_for_help_run_nothing():
    """Scripts that are asked for help run nothing, since all parse their arguments first."""
    scripts = {file: file.read_text() for file in (ROOT / "benchmarks").glob("*.py")}
    started = {file.stem for file, text in scripts.items() if "__main__" in text and "ArgumentParser(" not in text}
    assert not started


def test_no_two_files_import_each_other():
    graph = grimp.build_graph("bigdit")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "bigdit.emulator.inside.libraries" in imports["bigdit.emulator.inside.values"]  # also relative imports
    assert len(imports) > 250
    assert circles(imports) == []


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}, "e": {"a"}}, [["b", "c", "d"]]),
        ({"a": {"a"}}, [["a"]]),
    ],
)
def test_a_circle_would_be_found(imports, found):
    assert circles(imports) == found


UNPICKLES = re.compile(
    r"(pickle|dill|cloudpickle|joblib|marshal|torch|torch\.jit|torch\.hub)\.(load|loads|Unpickler)|shelve\.open"
    r"|yaml\.(load|load_all|full_load|unsafe_load)"
)
WITHOUT_WEIGHTS = re.compile(r"(tokenizer|processor|config_class)$", re.IGNORECASE)


def unsafe(source):
    """Calls in a source that unpickle, or that may run code from a folder of weights."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name, printed = ast.unparse(call.func), {each.arg: ast.unparse(each.value) for each in call.keywords}
        owner, _, method = name.rpartition(".")
        if UNPICKLES.fullmatch(name) or printed.get("allow_pickle", "False") != "False":
            found.append(name)
        if method == "from_pretrained":
            safe = {"trust_remote_code": "False"}
            safe |= {} if WITHOUT_WEIGHTS.search(owner) else {"use_safetensors": "True"}
            found += [f"{name} without {key}={value}" for key, value in safe.items() if printed.get(key) != value]
    return found


def test_nothing_is_unpickled_and_no_code_of_a_folder_is_run():
    sources = [file for each in ("bigdit", "launch", "benchmarks", "docs") for file in (ROOT / each).rglob("*.py")]
    assert len(sources) > 300
    found = {str(file.relative_to(ROOT)): calls for file in sources if (calls := unsafe(file.read_text()))}
    assert found == {"bigdit/models/traces.py": ["pickle.loads"]}  # its own files, among those that Inductor unpickles


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("torch.load(f, weights_only=True)", ["torch.load"]),
        ("pickle.Unpickler(f).load()", ["pickle.Unpickler"]),
        ("np.load(f, allow_pickle=True)", ["np.load"]),
        ("np.load(f); yaml.safe_load(f); json.load(f); pickle.dumps(x)", []),
        ("yaml.load(f, Loader)", ["yaml.load"]),
        ("AutoTokenizer.from_pretrained(f)", ["AutoTokenizer.from_pretrained without trust_remote_code=False"]),
        ("C.from_pretrained(f, use_safetensors=True, trust_remote_code=False)", []),
        (
            "transformers.AutoModel.from_pretrained(f, trust_remote_code=False)",
            ["transformers.AutoModel.from_pretrained without use_safetensors=True"],
        ),
    ],
)
def test_an_unsafe_call_would_be_found(source, calls):
    assert unsafe(source) == calls


def test_a_wheel_has_every_file():
    """Python files are included where there is an __init__.py beside them. Others must be in setup.cfg's
    package_data."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    packed = {
        file
        for package, patterns in config["options.package_data"].items()
        for pattern in patterns.split(",")
        for file in (ROOT / package.replace(".", "/")).glob(pattern.strip())
    }
    files = [file for file in PACKAGE.rglob("*") if file.is_file() and file.parent.name != "__pycache__"]
    alone = [file for file in files if file.suffix != ".py" or not (file.parent / "__init__.py").exists()]
    assert len(alone) > 20
    assert sorted(set(alone) - packed) == []


@pytest.mark.parametrize("file", layers(), ids=lambda file: str(file.relative_to(ROOT)))
def test_every_layer_says_what_it_is(file):
    printed = ast.get_docstring(ast.parse(file.read_text()))
    assert printed is not None
    assert printed.split("\n\n")[0].endswith(".")


def test_the_drawing_has_the_layers_that_are_held():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    drawn = [f"bigdit.{name}" for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(drawn) == sorted(named())


def test_no_text_has_both_sides_of_a_merge():
    texts = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), ROOT / "Makefile", ROOT / "setup.cfg"]
    assert [text for text in texts if re.search("^(<{7}|>{7}) ", text.read_text(), re.MULTILINE)] == []


def test_what_programs_leave_behind_ends_with_the_tests():
    """As torchrun leaves a folder of logs."""
    leave = "import tempfile; print(tempfile.mkdtemp())"
    left = subprocess.run([sys.executable, "-c", leave], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(left).parent == Path(os.environ["XDG_DATA_HOME"]).parent != Path("/tmp")
