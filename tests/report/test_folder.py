"""The folder of a plan: whole or absent, never over other files, and trained from."""

import json

import plans
import pytest
import yaml
from commands import bigdit, in_process
from pipeline_folders import changed, pipeline_folder

from bigdit.catalog import batch_shape, model, user_model
from bigdit.catalog.families import objective_of
from bigdit.config.plan_file import read_plan_file
from bigdit.config.stages import load_run, load_stages
from bigdit.errors import UserError
from bigdit.objective_spec import learned
from bigdit.recipes import MEASURED, names, recipe
from bigdit.report.how_to_run import commands, skeleton
from bigdit.report.page import OURS, write_plan
from bigdit.search.answer import PLANS
from bigdit.search.plan import Plan, record
from bigdit.speed.seconds import Interval
from bigdit.strategy import LoraSpec, Strategy
from bigdit.train.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]  # only the recorded run takes long


@pytest.fixture(scope="module")
def made():
    return plans.made_plan()


def of_model(plan, model):
    """The plan with another model."""
    return plan.model_copy(update={"request": plan.request.model_copy(update={"model": model})})


def test_the_folder_of_a_plan(made, tmp_path):
    folder = tmp_path / "new/plan"
    written = write_plan(made, folder)
    assert {file.name for file in written} == OURS - {"ds_config.json"}
    assert read_plan_file(folder) == record(made, skeleton(made))
    document = json.loads((folder / "plan.json").read_text())
    assert document.pop("fits") is True
    assert Plan.model_validate(document) == made
    for image in ("memory.png", "curve.png"):
        assert (folder / image).read_bytes().startswith(b"\x89PNG")
    assert list(folder.parent.iterdir()) == [folder]


def test_a_kept_plan_is_believed_as_it_was_written_alone(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BIGDIT_CACHE", str(tmp_path))
    PLANS.keep(("request",), made)
    assert PLANS.find(("request",)) == made
    (file,) = tmp_path.rglob("*.json")
    whole = file.read_text()
    file.write_text(whole.replace(str(made.chosen.peak_allocated_bytes), "1"))  # still a plan, with other figures
    assert PLANS.find(("request",)) is None
    assert capsys.readouterr().err == f"{file} is damaged, and the plan is made again\n"


def test_deepspeeds_document_is_complete_and_accepted(tmp_path):
    plan = plans.sharded_plan(8)
    write_plan(plan, tmp_path / "plan")
    text = (tmp_path / "plan/ds_config.json").read_text()
    assert "auto" not in text
    strategy = plan.chosen.strategy
    assert json.loads(text) == strategy.ds_document
    assert Strategy.model_validate(dict(strategy) | {"ds_config": json.loads(text)}) == strategy


@pytest.mark.parametrize("make", [plans.made_plan, lambda: plans.sharded_plan(8)], ids=["single", "deepspeed"])
def test_the_skeleton_runs_by_its_plan(make, tmp_path):
    plan = make()
    folder = tmp_path / "plan"
    write_plan(plan, folder)
    (stage,) = load_stages(folder / "run.yaml")
    run, strategy = stage.run, stage.run.strategy
    assert stage.plan == record(plan, skeleton(plan))
    assert stage.notices(plan.catalogue) == []
    learning = plan.chosen.strategy.optimizer.model_copy(update={"lr": strategy.optimizer.lr})  # the run's own
    assert strategy == plan.chosen.strategy.model_copy(update={"optimizer": learning})
    assert run.train.steps == plan.run.steps
    assert run.data.buckets == ((1024, 1024), (832, 1248), (512, 512))
    by_plan = ("train", "--config", folder / "run.yaml", "--dry-run")
    done = bigdit(*by_plan, "--set", "model.init_from=null")  # DeepSpeed's logger writes into a process's own stdout
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["strategy"] == strategy.model_dump(mode="json")
    assert "note: sana-1600m-1024 starts from random weights; model.init_from: FOLDER starts from" in done.stderr
    missing = in_process(*by_plan)
    assert missing.returncode == 1
    assert "model.init_from: models/Sana_1600M_1024px_diffusers/transformer does not hold" in missing.stderr


@pytest.mark.parametrize("name", [name for name in names() if recipe(name).stages == 1])
def test_a_run_starts_as_the_recipe_of_its_model_does(made, tmp_path, monkeypatch, name):
    """From its weights, with its objective, steps and rate."""
    found = recipe(name)
    lora = LoraSpec(rank=16) if "lora" in found.run["strategy"] else None
    strategy = made.chosen.strategy.model_copy(update={"lora": lora})
    asked = model(found.about.model)
    plan = of_model(made, asked).model_copy(
        update={"run": None, "chosen": made.chosen.model_copy(update={"strategy": strategy})}
    )
    plan = plan.model_copy(update={"batch": batch_shape(asked)})
    text = skeleton(plan)
    (tmp_path / "own.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    own, known = load_run(tmp_path / "own.yaml", ["plan=null"]), load_run(MEASURED.parent / f"{name}.yaml")
    assert own.model == known.model
    assert own.encoders.image.path == known.encoders.image.path
    mine, theirs = (objective_of(asked.spec, run.objective) for run in (own, known))
    assert own.objective == mine
    assert learned(mine) == learned(theirs)
    assert getattr(mine, "shift", None) == getattr(theirs, "shift", None)
    assert own.strategy.optimizer.lr == known.strategy.optimizer.lr
    assert (own.train.steps, own.train.warmup_steps) == (known.train.steps, known.train.warmup_steps)
    assert f" --local-dir {found.weights}\n" in text.replace(" # accept", "\n")


@pytest.mark.parametrize(("name", "scratch"), [("flux.1-dev", True), ("dit-s-8", False)])
def test_random_weights_are_asked_for_or_all_that_there_is(made, name, scratch):
    plan = of_model(made, model(name)).model_copy(update={"run": None})
    plan = plan.model_copy(update={"request": plan.request.model_copy(update={"from_scratch": scratch})})
    run = yaml.safe_load(skeleton(plan))
    assert "init_from" not in run["model"]
    assert (run["train"]["steps"], run["train"]["warmup_steps"], run["strategy"]["optimizer"]["lr"]) == (
        100_000,
        1000,
        1e-4,
    )
    assert "# It starts from random weights" in skeleton(plan)
    assert ("no published ones are known" in skeleton(plan)) is not scratch


def test_a_short_run_leaves_its_warm_up(made):
    few = made.model_copy(update={"run": made.run.model_copy(update={"steps": 4})})
    assert yaml.safe_load(skeleton(few))["train"]["warmup_steps"] == 0


def test_a_bucket_that_is_too_large_for_the_micro_batch_is_left_out(made):
    small = made.buckets[1].model_copy(update={"recommended": 7})
    run = yaml.safe_load(skeleton(made.model_copy(update={"buckets": (made.buckets[0], small)})))
    assert run["data"]["buckets"] == [[1024, 1024]]


def test_a_users_model_is_paired_with_the_encoders_in_its_folder(made, tmp_path):
    folder = pipeline_folder(tmp_path / "mine", "Efficient-Large-Model/Sana_1600M_1024px_diffusers")
    run = yaml.safe_load(skeleton(of_model(made, user_model(folder))))
    assert run["encoders"]["text"]["pipeline"] == str(folder)
    assert run["encoders"]["image"] == {"name": "vae", "class_name": "AutoencoderDC", "path": f"{folder}/vae"}
    changed(folder / "vae/config.json", _class_name="AutoencoderOfMine")  # the plan has another VAE
    text = skeleton(of_model(made, user_model(folder)))
    assert yaml.safe_load(text)["encoders"]["image"]["path"] == "path/to/SanaPipeline/vae"
    assert f"# The plan assumes dc-ae-f32c32-sana: the VAE of {folder} is unknown or missing.\n" in text


def test_a_model_of_classes_is_run_by_folders_of_classes(made, tmp_path):
    plan = of_model(made, model("dit-xl-2"))
    (tmp_path / "run.yaml").write_text(skeleton(plan))
    run = load_run(tmp_path / "run.yaml", ["plan=null"])
    assert (run.data.images[0].label, run.encoders.text) == ("folder", None)
    assert prepare(run) == plan.request.model.spec
    assert commands(plan, tmp_path)[0].words[:2] == ("bigdit", "extract")
    assert "cannot encode" not in skeleton(plan)


@pytest.mark.parametrize(
    ("name", "frames", "fps"), [("wan2.1-t2v-1.3b", 81, 16), ("cogvideox1.5-5b", 85, 16), ("ltx-video-0.9", 161, 25)]
)
def test_a_model_of_videos_is_run_with_frames_and_their_rate(made, tmp_path, name, frames, fps):
    """CogVideoX 1.5 pads 81 frames to patches of two latent frames, which 85 fill."""
    plan = of_model(made, model(name)).model_copy(update={"batch": batch_shape(model(name))})
    (tmp_path / "run.yaml").write_text(skeleton(plan))
    run = load_run(tmp_path / "run.yaml", ["plan=null"])
    assert (run.data.buckets[0], run.data.fps) == ((frames, 1024, 1024), fps)
    assert run.encoders.image.class_name == plan.request.model.vae.class_name
    assert prepare(run) == plan.request.model.spec
    assert commands(plan, tmp_path)[0].words[:2] == ("bigdit", "extract")
    assert "cannot encode" not in skeleton(plan)


@pytest.mark.parametrize(
    ("name", "vae", "tokens"),
    [
        ("hunyuandit-v1.2", "AutoencoderKL", 256),
        ("hunyuanimage-2.1", "AutoencoderKLHunyuanImage", 1000),
        ("sd3.5-medium", "AutoencoderKL", 256),  # after CLIP's 77
    ],
)
def test_a_model_of_several_texts_is_run_by_its_pipeline(made, tmp_path, name, vae, tokens):
    plan = of_model(made, model(name))
    (tmp_path / "run.yaml").write_text(skeleton(plan))
    run = load_run(tmp_path / "run.yaml", ["plan=null"])
    assert (run.encoders.image.class_name, run.encoders.text.max_tokens) == (vae, tokens)
    assert prepare(run) == plan.request.model.spec
    assert commands(plan, tmp_path)[0].words[:2] == ("bigdit", "extract")
    assert run.data.part_size == 256


def test_the_run_names_the_weights_that_it_starts_from(made):
    strategy = made.chosen.strategy.model_copy(update={"lora": LoraSpec(rank=16)})
    adapted = made.model_copy(update={"chosen": made.chosen.model_copy(update={"strategy": strategy})})
    for run in (yaml.safe_load(skeleton(plan)) for plan in (adapted, made)):
        assert run["model"]["init_from"] == run["encoders"]["image"]["path"].replace("/vae", "/transformer")


def test_large_samples_are_written_in_small_parts(made, tmp_path):
    data = made.dataset.model_copy(update={"store_bytes": Interval(low=0, high=35e6 * made.dataset.images)})
    plan = of_model(made, model("hidream-i1")).model_copy(update={"dataset": data})
    assert yaml.safe_load(skeleton(plan))["data"]["part_size"] == 16


def test_text_that_is_encoded_elsewhere_has_its_model_named(made, tmp_path):
    known = model("flux.2-klein-4b")
    other = known.model_copy(update={"text": known.text.model_copy(update={"dim": 4096})})
    klein, unknown = (of_model(made, each) for each in (known, other))
    assert "cannot encode" not in skeleton(klein)
    assert yaml.safe_load(skeleton(klein))["encoders"]["text"]["pipeline"] == "models/FLUX.2-klein-4B"
    assert commands(klein, tmp_path)[0].words[:2] == ("bigdit", "extract")
    assert "`bigdit extract` cannot encode the text of Flux2Transformer2DModel" in skeleton(unknown)
    assert commands(unknown, tmp_path)[0].words[:2] != ("bigdit", "extract")


def test_what_is_assumed_of_a_users_model_is_reported_where_its_encoders_are_filled_in(made, tmp_path):
    """One class has PixArt-α's and PixArt-Σ's encoders, which are in two classes of pipelines."""
    file = tmp_path / "mine/config.json"
    file.parent.mkdir()
    alpha = model("pixart-alpha-xl-2-512").spec
    file.write_text(json.dumps({"_class_name": alpha.class_name} | alpha.kwargs))
    text = skeleton(of_model(made, user_model(file)))
    printed = "the VAE (sd-vae-ft, 8 × 8 pixels a latent) and 120 text tokens, taken from pixart-alpha-xl-2-512"
    assert f"# Not verified for mine: {printed}.\n" in text
    assert yaml.safe_load(text)["encoders"]["text"] == {"pipeline": "path/to/pipeline", "max_tokens": 120}


def test_no_encoders_are_named_that_a_users_model_cannot_take(made, tmp_path):
    """From a config.json alone, whose latents and text the catalogue does not know: the run says what is needed
    instead."""
    config = {"_class_name": "SanaTransformer2DModel"} | made.request.model.spec.kwargs
    file = tmp_path / "odd/config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    assert "path/to/SanaPipeline/vae" in skeleton(of_model(made, user_model(file)))
    changed(file, in_channels=16, caption_channels=640)
    text = skeleton(of_model(made, user_model(file)))
    assert "Sana" not in yaml.safe_load(text)["encoders"]["text"]["pipeline"]
    assert (
        "# The VAE must give 16 channels and 32 × 32 pixels a latent, and the text encoder states of width 640:\n"
        in text
    )


def test_a_newer_plan_takes_the_place_of_an_older_one(made, tmp_path):
    folder = tmp_path / "plan"
    write_plan(plans.sharded_plan(8), folder)
    write_plan(made, folder)
    assert not (folder / "ds_config.json").exists()
    assert read_plan_file(folder) == record(made, skeleton(made))


def test_a_run_that_was_edited_is_kept_and_one_that_was_not_follows_the_plan(made, tmp_path):
    folder = tmp_path / "plan"
    write_plan(made, folder)
    other = made.model_copy(update={"buckets": made.buckets[:1]})
    write_plan(other, folder)
    assert (folder / "run.yaml").read_text() == skeleton(other)
    (folder / "run.yaml").write_text("mine: true\n")
    write_plan(made, folder)
    assert (folder / "run.yaml").read_text() == "mine: true\n"
    (folder / "plan.yaml").write_text("{")
    write_plan(made, folder)
    assert (folder / "run.yaml").read_text() == "mine: true\n"


def test_the_strategy_of_an_edited_run_is_the_new_plans_and_its_constants_stay(made, tmp_path):
    folder = tmp_path / "plan"
    write_plan(made, folder)
    edited = (
        (folder / "run.yaml")
        .read_text()
        .replace("path/to/images", "mine # of last year")
        .replace("lr: 2.0e-05", "lr: 3.0e-05")
    )
    (folder / "run.yaml").write_text(edited)
    other = plans.sharded_plan(8)
    write_plan(other, folder)
    text, run = (folder / "run.yaml").read_text(), load_run(folder / "run.yaml")
    assert "  images: mine # of last year\n" in text
    assert run.strategy.optimizer.lr == 3e-5
    learning = other.chosen.strategy.optimizer.model_copy(update={"lr": 3e-5})
    assert run.strategy == other.chosen.strategy.model_copy(update={"optimizer": learning})


def refused(plan, folder):
    with pytest.raises(UserError) as caught:
        write_plan(plan, folder)
    (line,) = caught.value.problems
    return line


def test_what_no_plan_wrote_is_not_deleted(made, tmp_path):
    (tmp_path / "weights.bin").write_text("precious")
    assert refused(made, tmp_path) == (
        f"--out: {tmp_path} holds weights.bin and no plan; name another folder, or an empty one"
    )
    folder = tmp_path / "plan"
    write_plan(made, folder)
    (folder / "notes").mkdir()
    assert refused(made, folder) == (
        f"--out: {folder} holds notes, which no plan wrote; move it, or name another folder"
    )
    assert refused(made, tmp_path / "weights.bin") == f"--out: {tmp_path}/weights.bin is a file; name a folder"
    assert refused(made, tmp_path / "weights.bin/plan").startswith(f"--out: cannot write {tmp_path}/weights.bin/plan: ")
    assert (tmp_path / "weights.bin").read_text() == "precious"
    assert {file.name for file in tmp_path.iterdir()} == {"weights.bin", "plan"}


def test_a_plan_that_cannot_be_finished_leaves_the_old_one(made, tmp_path, monkeypatch):
    folder = tmp_path / "plan"
    write_plan(plans.sharded_plan(8), folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    damaged = made.model_copy(update={"packed_timeline": "not a timeline"})
    with pytest.raises(ValueError, match="not a packed timeline"):
        write_plan(damaged, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]
