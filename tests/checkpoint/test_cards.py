"""The model card beside exported weights: what the hub reads from it, and nothing private."""

import json
import shutil

import pytest
import yaml

from bigdit import checkpoint
from bigdit.checkpoint.folder import write_state
from bigdit.commands import export as export_command


def parts(folder):
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    lines = (line.strip("| ") for line in body.splitlines() if line.startswith("| "))
    rows = dict(line.split(" | ", 1) for line in lines if " | " in line and not line.startswith("---"))
    return yaml.safe_load(front), rows, body


def test_a_card_says_what_a_run_trained(trained):
    front, rows, body = parts(trained / "exports/step-00000008")
    assert front == {"library_name": "diffusers", "tags": ["bigdit", "text-to-image"]}
    assert rows["Base"] == "none: it started from random weights"
    assert rows["Data"] == "digits"
    assert rows["Steps"] == "8 of 16 samples: 128 samples, counted with repeats"
    assert rows["Trained"] == "the whole transformer"
    assert rows["Optimizer"] == "AdamW, learning rate 0.002"
    assert rows["GPU"] == "none: it ran on a CPU"
    assert rows["Versions"].startswith("bigdit ")
    settings = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])["strategy"]
    assert (settings["grad_accum_steps"], settings["micro_batch_size"]) == (2, 8)
    assert "/" not in body.replace(" / ", "")


@pytest.fixture
def altered(trained, tmp_path):
    """An output of the trained run with other words in its state, exported."""

    def make(run=(), **others):
        found = checkpoint.latest(trained)[0]
        shutil.copytree(trained / "checkpoints", tmp_path / "run/checkpoints")
        changed = json.loads(json.dumps(found.state["run"]))
        for (section, key), value in dict(run).items():
            changed[section][key] = value
        write_state(tmp_path / "run/checkpoints" / found.folder.name, found.state | {"run": changed} | others)
        export_command.run(tmp_path / "run", tmp_path / "out")
        return parts(tmp_path / "out")

    return make


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("license: apache-2.0\n", {"license": "apache-2.0"}),
        (
            "license: other\nlicense_name: some-licence\nlicense_link: LICENSE.md\ntags: [a]\n",
            {"license": "other", "license_name": "some-licence", "license_link": "LICENSE.md"},
        ),
        ("tags: [a]\n", {}),
        ("license: [\n", {}),
        (None, {}),
    ],
)
def test_the_licence_is_that_of_the_base(altered, tmp_path, text, known):
    base = tmp_path / "private/base/transformer"
    base.mkdir(parents=True)
    if text is not None:
        (base.parent / "README.md").write_text(f"---\n{text}---\n# A model\n")
    front, rows, _ = altered({("model", "init_from"): str(base)})
    assert {key: value for key, value in front.items() if key.startswith("license")} == known
    assert rows["Licence of the base"] == (
        ", ".join(known.values()) or "not known here: read it where the base is published"
    )
    assert "private" not in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("given", [("data", "references"), ("data", "fill")])
def test_a_model_of_edits_is_found_among_those_that_take_images(altered, given):
    front, _, _ = altered({given: 1})
    assert front["tags"] == ["bigdit", "image-to-image"]


@pytest.mark.parametrize(
    ("name", "base", "known"),
    [
        ("flux.1-dev", "/models/flux/transformer", "flux-1-dev-non-commercial-license"),
        ("flux.1-dev", "/models/FLUX.1-Krea-dev/flux1-krea-dev.safetensors", "flux-1-dev-non-commercial-license"),
        ("wan2.2-t2v-a14b-high", "/models/mine/transformer", "apache-2.0"),
        (
            "flux.2-klein-9b",
            "/hub/models--black-forest-labs--FLUX.2-klein-9B/snapshots/1/transformer",
            "non-commercial",
        ),
        ("dit-xl-2", "/models/dit/transformer", "not known here"),
        (
            "ltx-video-0.9",
            "/models/ltx/transformer",
            "https://huggingface.co/Lightricks/LTX-Video/blob/main/License.txt",
        ),
    ],
)
def test_the_licence_of_a_known_repository_is_in_the_catalogue(altered, trained, name, base, known):
    model = checkpoint.latest(trained)[0].state["model"] | {"name": name}
    front, rows, _ = altered({("model", "init_from"): base}, model=model)
    assert known in rows["Licence of the base"]
    assert ("license" in front) == (known != "not known here")


def test_a_base_of_the_hub_and_a_trigger_word_are_named(altered, trained):
    model = checkpoint.latest(trained)[0].state["model"] | {"name": "sana-1600m-1024"}
    source = {"path": "/home/someone/my dog|s", "caption_prefix": "sks dog, "}
    base = "/hub/models--Efficient-Large-Model--Sana_1600M_1024px_diffusers/snapshots/1/transformer"
    front, rows, _ = altered({("model", "init_from"): base, ("data", "images"): [source]}, model=model)
    assert front["base_model"] == "Efficient-Large-Model/Sana_1600M_1024px_diffusers"
    assert front["instance_prompt"] == "sks dog"
    assert rows["Base"] == "Efficient-Large-Model/Sana_1600M_1024px_diffusers"
    assert rows["Data"] == r"my dog\|s"
