"""LoRA of the CLIP text encoders in the step, for SD3 and Flux.1, beside a plain loop of PyTorch and peft."""

import json
import os
import subprocess

import diffusers
import pytest
import tiny_pipelines
import tiny_sources
import tiny_vaes
import torch
import yaml
from commands import ROOT, in_process, run_ranks, with_set
from gpus import A40
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from tiny_pipelines import FLUX, SD3

from bigdit import checkpoint, engines, models, objectives
from bigdit.catalog.encoders import OnlineEncoders, TextEncoderSpec, VaeSpec
from bigdit.catalog.families import objective_of
from bigdit.catalog.resolve import model_spec
from bigdit.config.stages import load_run
from bigdit.emulator import emulated_environment
from bigdit.emulator.interpreter import cuda_python
from bigdit.encoders.components import load_text_pipeline
from bigdit.loader.batch import Batch, CaptionedBatch
from bigdit.loader.online import RunEncoders
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.sampling.conditions import SamplingOptions
from bigdit.sampling.sampler import Sampler
from bigdit.sources.open import open_source
from bigdit.strategy import BatchShape
from bigdit.train.step import encode, train_step

CASES = {
    "StableDiffusion3Pipeline": ("SD3Transformer2DModel", SD3, ["text_encoder", "text_encoder_2"]),
    "FluxPipeline": ("FluxTransformer2DModel", FLUX, ["text_encoder"]),
}
OF_TWO_ENCODERS = pytest.mark.parametrize("case", ["StableDiffusion3Pipeline"], indirect=True)
BIGDIT = ("-c", "from bigdit.cli import main; main()", "train")
HELD = 1024
"""Bytes: a step's loss and norm, which the loop reads in the next step."""
TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj"]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A pipeline's name, and the config of a run over four images and its tiny encoders."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    class_name, kwargs, _ = CASES[name]
    for number in range(4):
        tiny_sources.save(folder / "images" / f"{number}.png", f"a cat {number}", tiny_sources.gradient(16, 16))
    torch.manual_seed(0)
    tiny_vaes.VAES["AutoencoderKL"][0]().save_pretrained(folder / "vae")
    (folder / "pipeline").mkdir()
    tiny_pipelines.save(folder / "pipeline", name)
    getattr(diffusers, class_name)(**kwargs).save_pretrained(folder / "transformer")
    lora = {"rank": 2, "alpha": 4, "text_encoders": True, "text_encoder_lr": 2.0e-3}
    config = {
        "model": {"class_name": class_name, "kwargs": kwargs, "init_from": str(folder / "transformer")},
        "data": {"images": str(folder / "images"), "buckets": [[16, 16]], "caption_dropout": 0.5},
        "encoders": {
            "image": {"name": "vae", "class_name": "AutoencoderKL", "path": str(folder / "vae")},
            "text": {"pipeline": str(folder / "pipeline"), "dtype": "bf16"},
        },
        "strategy": {
            "features": "online",
            "micro_batch_size": 2,
            "optimizer": {"lr": 1.0e-2},
            "lora": lora,
            "ema": {"decay": 0.5},
        },
        "train": {"steps": 3, "export_every": 3, "warmup_steps": 0},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return name, folder / "run.yaml"


def masters(output):
    found, _ = checkpoint.latest(output)
    return {
        name: tensor for file in sorted(found.engine.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def trained(case):
    """The run's output after its three steps."""
    _, path = case
    assert in_process("train", "--config", path).returncode == 0
    return load_run(path).output


def _model(run):
    spec = model_spec(run.model)
    family = models.family(spec.class_name)
    model = checkpoint.load_model(spec, run.model.init_from, dtype=torch.bfloat16)
    return spec, family, models.equip(model, family, run.strategy, seed=5)


def test_loss_and_gradients_are_those_of_a_plain_loop_with_peft(case):
    """diffusers' encode_prompt, peft's adapters in q, k, v and out, a dropped caption, and two micro-batches."""
    name, path = case
    run = load_run(path)
    spec, family, model = _model(run)
    encoders = RunEncoders(run, torch.device("cpu"), 2, open_source(run.data))
    models.adapt_text(model, encoders.trained, run.strategy, seed=5)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    values = (
        checkpoint.restore.trained(model)
        if False
        else {each: value.detach().clone() for each, value in model.named_parameters() if value.requires_grad}
    )
    assert {each.split(".")[1] for each in values if each.startswith("text_encoders.")} == {*CASES[name][2]}

    objective = objective_of(spec, run.objective)
    captions = [("a cat 0", None), ("Two dogs, a red house", "a cat")]
    pixels = torch.randint(0, 256, (2, 2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    batches = [CaptionedBatch(pixels[i], captions[i], (0, 1), (2 * i, 2 * i + 1), {}, ()) for i in range(2)]
    strategy = run.strategy.model_copy(update={"grad_accum_steps": 2, "gradient_clipping": None})
    engine = engines.create(strategy, model, family, device=torch.device("cpu"))
    gradients = {}
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(
            {each: master.grad.clone() for each, master in zip(values, engine.masters, strict=True)}
        )
    )
    found = train_step(
        engine, family, objective, batches, lr=1e-2, encode=lambda batch, dtype: encode(encoders, 1, batch, dtype)
    )
    assert [round(group["lr"], 9) for group in engine.optimizer.param_groups] == [1e-2, 2e-3]

    pipeline = load_text_pipeline(path.parent / "pipeline", torch.bfloat16, torch.device("cpu"))
    for part in (each for each in pipeline.components.values() if isinstance(each, torch.nn.Module)):
        part.requires_grad_(False)
    transformer = checkpoint.load_model(spec, run.model.init_from, dtype=torch.bfloat16).requires_grad_(False)
    targets = [each.removesuffix(".lora_A.default.weight") for each in values if each.endswith("lora_A.default.weight")]
    own = [each for each in targets if not each.startswith("text_encoders.")]
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=own), transformer)
    parts = {"": transformer}
    for part in CASES[name][2]:
        clip = getattr(pipeline, part).requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS), clip)
        parts[f"text_encoders.{part}."] = getattr(clip, "text_model", clip)
    plain = {f"{before}{each}": value for before, part in parts.items() for each, value in part.named_parameters()}
    with torch.no_grad():
        for each, value in values.items():
            plain[each].copy_(value)
    losses = []
    for batch, words in zip(batches, captions, strict=True):
        with torch.no_grad():
            latents = torch.cat([encoders.image.encode(each[None].float() / 127.5 - 1) for each in batch.pixels])
            latents = latents.to(encoders.image.stored_dtype).float()
        texts = [caption or "" for caption in words]  # one by one, as on a CPU: other shapes round differently
        if name == "FluxPipeline":
            given = [pipeline.encode_prompt(each, each)[:2] for each in texts]
        else:
            given = [pipeline.encode_prompt(each, each, each, do_classifier_free_guidance=False)[::2] for each in texts]
        states, pooled = (torch.cat(each) for each in zip(*given, strict=True))

        def predict(noisy, t, states=states, pooled=pooled, latents=latents, seeds=batch.seeds):
            shown = torch.ones(states.shape[:2])
            conditions = Batch(latents, states, shown, seeds, {"pooled_text": pooled})
            return family.predict(transformer, noisy, t, conditions)

        tokens = family.tokens(transformer, latents.shape)
        loss = objectives.loss(objective, predict, latents, batch.seeds, torch.bfloat16, tokens)
        (loss / 2).backward()
        losses.append(loss.detach())
    torch.testing.assert_close(found.loss, torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)
    for each, value in gradients.items():
        assert torch.equal(value, plain[each].grad.float()), each
    for part in CASES[name][2]:
        assert any(gradients[each].any() for each in gradients if each.startswith(f"text_encoders.{part}."))


@OF_TWO_ENCODERS
def test_a_run_resumes_to_the_bit(case, trained, tmp_path):
    _, path = case
    for steps in (2, 3):
        own = with_set([f"output={tmp_path}/run", f"train.steps={steps}"])
        assert in_process("train", "--config", path, *own).returncode == 0
    whole, resumed = masters(trained), masters(tmp_path / "run")
    assert any("master.text_encoders." in name for name in whole)
    assert any("ema" in name and "text_encoders." in name for name in whole)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], each) for name, each in whole.items())


@pytest.mark.slow
@OF_TWO_ENCODERS
def test_two_replicas_train_encoders_as_one_process_does(case, tmp_path):
    """Each has its own half of a batch, and one process resumes what they saved."""
    _, path = case
    shared = ["strategy.precision=fp32", "encoders.text.dtype=fp32", "strategy.lora.base=int8"]
    shared += ["strategy.global_batch_size=4", "train.steps=2"]
    settings = with_set([*shared, f"output={tmp_path}/alone"])
    assert in_process("train", "--config", path, *settings).returncode == 0
    own = [*shared, f"output={tmp_path}/two", "strategy.engine=ddp", "strategy.world_size=2"]
    done = run_ranks(2, ROOT / "launch/train.py", "--config", path, *with_set(own))
    assert done.returncode == 0, done.stderr
    one, two = masters(tmp_path / "alone"), masters(tmp_path / "two")
    assert one.keys() == two.keys()
    assert any(name.startswith("master.text_encoders.") for name in one)
    for name, each in one.items():
        torch.testing.assert_close(two[name], each, rtol=1e-3, atol=1e-5, msg=name)
    again = [*shared, f"output={tmp_path}/two", "train.steps=3"]
    assert in_process("train", "--config", path, *with_set(again)).returncode == 0


def _loaded(name, path, output, folder="transformer"):
    """The pipeline of diffusers, with the run's export in it."""
    class_name, *_ = CASES[name]
    pipeline = load_text_pipeline(path.parent / "pipeline", torch.bfloat16, torch.device("cpu"))
    transformer = getattr(diffusers, class_name).from_pretrained(
        path.parent / "transformer", torch_dtype=torch.bfloat16
    )
    pipeline.register_modules(transformer=transformer)
    pipeline.load_lora_weights(output / "exports" / "step-00000003" / folder)
    for part in (each for each in pipeline.components.values() if isinstance(each, torch.nn.Module)):
        part.requires_grad_(False)
    return pipeline


def _encoded(name, pipeline, caption):
    if name == "FluxPipeline":
        return pipeline.encode_prompt(caption, caption)[:2]
    return pipeline.encode_prompt(caption, caption, caption, do_classifier_free_guidance=False)[::2]


@pytest.mark.parametrize("ema", [False, True])
def test_diffusers_loads_an_export_and_generates_from_the_texts_that_bigdit_samples_with(case, trained, ema):
    name, path = case
    found, _ = checkpoint.latest(trained)
    sampler = Sampler(found, torch.device("cpu"), ema=ema)
    options = SamplingOptions(16, 16, steps=2, guidance=1.0)
    (latents,) = sampler.generate(["a cat"], options)
    with torch.no_grad():
        states, pooled = _encoded(
            name, _loaded(name, path, trained, "transformer_ema" if ema else "transformer"), "a cat"
        )
        frozen = load_text_pipeline(path.parent / "pipeline", torch.bfloat16, torch.device("cpu"))
        assert not torch.equal(pooled, _encoded(name, frozen, "a cat")[1])
        spec = model_spec(load_run(path).model)
        family, model = models.family(spec.class_name), sampler.model()
        noise = objectives.draw_noise(torch.empty(1, *latents.shape), [0])
        given = Batch(noise, states, torch.ones(states.shape[:2]), (0,), {"pooled_text": pooled})
        objective = objective_of(spec, load_run(path).objective)
        expected = objectives.sample(
            objective,
            objectives.default_sampler(objective),
            lambda noisy, t: family.predict(model, noisy.bfloat16(), t, given).float(),
            noise,
            2,
            family.tokens(model, noise.shape),
        )
    torch.testing.assert_close(latents, expected[0], rtol=0, atol=1e-2)


def test_comfyui_reads_the_names_of_an_export(case, trained):
    """By ComfyUI's comfy/lora.py, model_lora_keys_clip: clip_l is text_encoder, and clip_g text_encoder_2."""
    name, _ = case
    file = trained / "exports/step-00000003/transformer/pytorch_lora_weights.safetensors"
    of_text = {each for each in load_file(file) if not each.startswith("transformer.")}
    assert of_text == {
        f"{part}.text_model.encoder.layers.{layer}.self_attn.{target}.lora_{kind}.weight"
        for part in CASES[name][2]
        for layer in range(3)
        for target in TARGETS
        for kind in "AB"
    }


@pytest.mark.parametrize("names", ["checkpoint", "export", "kohya"])
def test_a_run_starts_from_adapters_of_text_encoders(case, trained, tmp_path, names):
    """From a checkpoint, an export, or a file with kohya's names and alpha."""
    _, path = case
    source = {"checkpoint": trained / "checkpoints/step-00000003", "export": trained / "exports/step-00000003"}.get(
        names
    )
    if source is None:
        source, tensors = tmp_path / "kohya.safetensors", {}
        written = load_file(trained / "exports/step-00000003/transformer/pytorch_lora_weights.safetensors")
        for name, tensor in written.items():
            layer, kind = name.removesuffix(".weight").rsplit(".", 1)
            if layer.startswith("text_encoder"):
                number = 2 if layer.startswith("text_encoder_2") else 1
                layer = f"lora_te{number}_" + layer.split(".", 1)[1].replace(".", "_")
                tensors[f"{layer}.{'lora_down' if kind == 'lora_A' else 'lora_up'}.weight"] = tensor
                tensors[f"{layer}.alpha"] = torch.tensor(2.0)
            else:
                tensors[name] = tensor
        save_file(tensors, source)
    spec, _, model = _model(run := load_run(path))
    encoders = RunEncoders(run, torch.device("cpu"), 2, open_source(run.data))
    models.adapt_text(model, encoders.trained, run.strategy, seed=5)
    notices = checkpoint.load_adapters(model, spec, run.strategy.lora, source)
    assert not any("left out" in each or "not in it" in each for each in notices)
    saved = masters(trained)
    for name, value in model.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(value, saved[f"master.{name}"].view(value.shape).bfloat16())


def test_what_text_encoders_exclude_is_an_error_of_one_line(case):
    _, path = case
    refused = {
        "strategy.features=cached": "features is cached: the encoders run in no step; set it to online",
        "strategy.compile_blocks=true": "was not tried with compile_blocks; leave one of them out",
        "strategy.engine=fsdp2": "engine is fsdp2, which shards them; use engine single, or leave it out",
        "strategy.lora.dora=true": "text_encoders is for LoRA, and DoRA is trained; set text_encoders to false",
        "strategy.lora.text_encoders=false": "text_encoder_lr is set, and text_encoders is false; set it to true",
        "encoders.text.dtype=fp32": "encoders.text.dtype is fp32, with strategy.precision bf16; set it to bf16",
        "data.references=1": "which needs a cache; set strategy.lora.text_encoders to false, and strategy.features to",
    }
    for override, why in refused.items():
        more = ["data.features=/none"] if "cached" in override else []
        found = in_process("train", "--dry-run", "--config", path, *with_set([override, *more]))
        assert found.returncode == 1
        assert why in found.stderr


@pytest.mark.slow
def test_a_run_takes_of_an_emulated_gpu_what_an_attempt_takes(case, tmp_path):
    """CLIP's activations last from encoding to the backward pass. Its adapters have masters and optimizer state."""
    name, path = case
    settings = [f"output={tmp_path / 'run'}", "train.export_every=null", "strategy.ema=null"]
    command = [str(cuda_python()), "-W", "ignore", *BIGDIT, "--config", str(path), *with_set(settings)]
    own = os.environ | emulated_environment(A40) | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "run/run.json").read_text())["measured"]["phases"]
    found = {each["phase"]: each["allocated_bytes"] for each in measured}
    run = load_run(path, settings)
    of_clip = (
        {"tokens": 77, "gives": "pooled"}
        if name == "FluxPipeline"
        else {"tokens": 77, "gives": "both", "layers": (-2,)}
    )
    of_t5 = {"tokens": 512 if name == "FluxPipeline" else 256}
    parts = [(part, of_clip) for part in CASES[name][2]]
    parts.append((f"text_encoder_{len(parts) + 1}", of_t5))
    text = []
    for part, given in parts:
        kwargs = json.loads((path.parent / "pipeline" / part / "config.json").read_text())
        (class_name,) = kwargs.pop("architectures")
        kwargs = {key: value for key, value in kwargs.items() if key not in ("dtype", "transformers_version")}
        config = "T5Config" if class_name.startswith("T5") else "CLIPTextConfig"
        text.append(TextEncoderSpec(class_name=class_name, config_class=config, kwargs=kwargs, **given))
    vae = json.loads((path.parent / "vae/config.json").read_text())
    vae = {key: value for key, value in vae.items() if not key.startswith("_")}
    encoders = RunEncoders(run, torch.device("cpu"), 1, open_source(run.data))
    request = StepRequest(
        model=model_spec(run.model),
        batch=BatchShape(
            latents=encoders.image.latent_shape((16, 16)), text=(encoders.text.max_tokens, 16), latents_dtype="bf16"
        ),
        strategy=run.strategy,
        encoders=OnlineEncoders(
            pixels=(3, 16, 16),
            vae=VaeSpec(class_name="AutoencoderKL", kwargs=vae, dtype=run.encoders.image.dtype),
            text=tuple(text),
        ),
    )
    with EmulatedGpus(A40, 1) as gpus:
        attempted = {phase: each.peak_bytes for phase, each in gpus.attempt(request).phases.items()}
    assert list(found) == list(attempted) == ["init", "encode", "forward", "backward", "step"]
    apart = {phase: found[phase] - attempted[phase] for phase in ("forward", "backward", "step")}
    assert apart == dict.fromkeys(apart, HELD)
    # An attempt has the ids of the whole micro-batch on the GPU.
    assert 0 <= attempted["encode"] + HELD - found["encode"] < 2**20
