"""Names of models and GPUs as people type them: found, answered by a short list, or refused with the true reason."""

import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from bigdit.catalog import FAMILIES, find_model, model, resolve_gpu
from bigdit.catalog.gpus import gpus
from bigdit.catalog.models import models, repositories
from bigdit.catalog.names import SUGGESTED, load_json, refusal, refusals
from bigdit.encoders.recipes import RECIPES
from bigdit.errors import UserError

FOUND = {
    "black-forest-labs/FLUX.1-dev": "flux.1-dev",
    **dict.fromkeys(("black-forest-labs/FLUX.1-Kontext-dev", "flux kontext", "kontext"), "flux.1-kontext-dev"),
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": "sana-1600m-1024",
    "Sana_1600M_1024px_diffusers": "sana-1600m-1024",
    "efficient-large-model/sana_1600m_4kpx_bf16_diffusers": "sana-1600m-4096",
    "stabilityai/stable-diffusion-3.5-large": "sd3.5-large",
    "stable-diffusion-3.5-large-turbo": "sd3.5-large",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan2.1-t2v-14b",
    "PixArt-alpha/PixArt-XL-2-1024-MS": "pixart-alpha-xl-2-1024",
    "THUDM/CogVideoX-5b": "cogvideox-5b",
    "zai-org/CogVideoX1.5-5B-I2V": "cogvideox1.5-5b-i2v",
    "zai-org/CogVideoX-5b": "cogvideox-5b",
    "THUDM/CogVideoX1.5-5B": "cogvideox1.5-5b",
    "cogvideox-1.5": "cogvideox1.5-5b",
    "z-image-turbo": "z-image",
    "ovis-image": "ovis-image-7b",
    "meituan-longcat/LongCat-Image-Dev": "longcat-image",
    "CogView3-Plus-3B": "cogview3-plus-3b",
    "briaai/BRIA-3.2": "bria-3.2",
    "bria": "bria-3.2",
    "flux-dev": "flux.1-dev",
    "flux1-dev": "flux.1-dev",
    "FLUX.1 dev": "flux.1-dev",
    "flux1schnell": "flux.1-schnell",
    "sd3.5-large": "sd3.5-large",
    "sd-3.5-large": "sd3.5-large",
    "wan-2.1-1.3b": "wan2.1-t2v-1.3b",
    "wan-1.3b": "wan2.1-t2v-1.3b",
    "Wan 5B": "wan2.2-ti2v-5b",
    "qwen": "qwen-image",
    "longcat": "longcat-image",
    "ovis": "ovis-image-7b",
    "ltxv-13b": "ltx-video-0.9.7-13b",
    "sana-2k": "sana-1600m-2048",
    "Sana 4K": "sana-1600m-4096",
}


@pytest.mark.parametrize("asked", FOUND)
def test_models_are_found_by_the_names_that_people_use(asked):
    assert find_model(asked).name == FOUND[asked]


GPUS = {
    "4090": "rtx-4090",
    "RTX4090": "rtx-4090",
    "3090ti": "rtx-3090-ti",
    "6000 ada": "rtx-6000-ada",
    "rtx4070tisuper": "rtx-4070-ti-super",
    "NVIDIA A100-SXM4-80GB": "a100-80g-sxm",
    "A100 80GB SXM": "a100-80g-sxm",
    "a100 40gb pcie": "a100-40g-pcie",
    "rtx pro 6000": "rtx-pro-6000",
    "5090": "rtx-5090",
    "h100-sxm5": "h100-sxm",
    "h100-80gb-hbm3": "h100-sxm",
    "H100 SXM": "h100-sxm",
}


@pytest.mark.parametrize("asked", GPUS)
def test_gpus_are_found_by_the_names_that_people_use(asked):
    assert resolve_gpu(asked).name == GPUS[asked]


def _refused(find, asked):
    with pytest.raises(UserError) as error:
        find(asked)
    (problem,) = error.value.problems
    return problem


ASKED_BACK = {
    "wan-2.1-14b": (find_model, "is ambiguous; name one of wan2.1-t2v-14b, wan2.1-i2v-14b-480p"),
    "flux2": (find_model, "is ambiguous; name one of flux.2-dev, flux.2-klein-4b, flux.2-klein-9b"),
    "dit-xl": (find_model, "did you mean dit-xl-2, dit-xl-4, dit-xl-8"),
    "hunyuan": (find_model, "did you mean hunyuandit-v1.2, hunyuandit-v1.1, hunyuanvideo-t2v, hunyuanimage-2.1?"),
    "unsloth/FLUX.1-dev": (
        find_model,
        "did you mean flux.1-dev, flux.1-fill-dev, flux.1-canny-dev, flux.1-depth-dev?",
    ),
    "wan": (find_model, "one of wan2.1-t2v-1.3b, wan2.1-t2v-14b, wan2.2-t2v-a14b-high, wan2.2-ti2v-5b"),
    **dict.fromkeys(
        ("wan2.2-t2v", "Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
        (find_model, "is ambiguous; name one of wan2.2-t2v-a14b-high, wan2.2-t2v-a14b-low"),
    ),
    "wan2.2": (find_model, "one of wan2.2-t2v-a14b-high, wan2.2-t2v-a14b-low, wan2.2-ti2v-5b"),
    "ltxv": (find_model, "is ambiguous; name one of ltx-video-0.9, ltx-video-0.9.7-13b"),
    "qwen-image-2": (
        find_model,
        "did you mean qwen-image, qwen-image-edit, qwen-image-edit-2511, qwen-image-edit-plus?",
    ),
    "sanna": (find_model, "did you mean sana-600m-1024, sana-1600m-1024"),
    "sana-160m": (find_model, "did you mean sana-1600m-1024"),
    "stable-diffusion": (find_model, "did you mean sd3-medium, sd3.5-large, sd3.5-medium?"),
    "A100": (resolve_gpu, "is ambiguous; name one of a100-40g-sxm, a100-40g-pcie, a100-80g-sxm, a100-80g-pcie"),
    **dict.fromkeys(
        ("a100-40", "A100 40GB", "a100-40g"), (resolve_gpu, "is ambiguous; name one of a100-40g-sxm, a100-40g-pcie")
    ),
    "a100-sxm": (resolve_gpu, "is ambiguous; name one of a100-40g-sxm, a100-80g-sxm"),
    "h100-80": (resolve_gpu, "is ambiguous; name one of h100-sxm, h100-pcie"),
    "Tesla V100": (resolve_gpu, "one of v100-16g-sxm2, v100-16g-pcie, v100-32g-sxm2, v100-32g-pcie"),
    "ada 6000": (resolve_gpu, "did you mean rtx-6000-ada?"),
    "RTX 4070 12GB": (resolve_gpu, "did you mean rtx-4070?"),
    "rtx-4091": (resolve_gpu, "did you mean rtx-4090"),
    "l40z": (resolve_gpu, "did you mean l40"),
}


@pytest.mark.parametrize("asked", ASKED_BACK)
def test_what_may_be_several_is_asked_back_with_a_short_list(asked):
    find, printed = ASKED_BACK[asked]
    problem = _refused(find, asked)
    assert printed in problem
    assert len(re.search("(?:one of|mean) (.*)", problem)[1].split(", ")) <= SUGGESTED


@pytest.mark.parametrize(("find", "asked"), [(find_model, "transformer"), (resolve_gpu, "kitchen")])
def test_of_what_nothing_is_like_nothing_is_proposed(find, asked):
    assert re.search(r"' is not in the catalogue; `bigdit (model|gpu)s` lists all$", _refused(find, asked))


REASONS = {
    "sdxl": (find_model, "SDXL and models tuned from it are U-Nets", "pixart-sigma-xl-2-1024"),
    "stabilityai/stable-diffusion-xl-base-1.0": (find_model, "are U-Nets (UNet2DConditionModel)", "sana-1600m-1024"),
    "runwayml/stable-diffusion-v1-5": (find_model, "Stable Diffusion 1 and 2 are U-Nets", "pixart-alpha-xl-2-512"),
    "sd1.5": (find_model, "Stable Diffusion 1 and 2 are U-Nets", "dit-xl-2"),
    "stable-diffusion-2-1": (find_model, "Stable Diffusion 1 and 2 are U-Nets", "dit-xl-2"),
    **dict.fromkeys(
        ("sd15", "sd-1-5", "stable-diffusion-1-5"), (find_model, "Stable Diffusion 1 and 2 are U-Nets", "dit-xl-2")
    ),
    **dict.fromkeys(
        ("unet", "if-xl", "DeepFloyd/IF-I-XL-v1.0", "stable-cascade"), (find_model, "it is a U-Net", "sana")
    ),
    **dict.fromkeys(("kolors", "playground", "playground-v2.5"), (find_model, "are U-Nets", "sana-1600m-1024")),
    **dict.fromkeys(
        ("stepfun-ai/stepvideo-t2v", "step-video", "omnigen2", "hunyuan-image-3", "infinity", "var"),
        (find_model, "diffusers has no class for it", ""),
    ),
    **dict.fromkeys(("flux3", "qwen-image-2.1", "cosmos"), (find_model, "no adapter for its class yet", "")),
    **dict.fromkeys(
        ("llama-3-8b", "gpt2", "qwen2.5-7b", "mistral-7b"),
        (find_model, "it is a language model, and bigdit plans diffusion transformers", ""),
    ),
    "sit": (find_model, "its transformer is DiT's, trained by flow matching", "dit-xl-2"),
    "opensora": (find_model, "diffusers has no class for it", ""),
    "hpcai-tech/Open-Sora": (find_model, "diffusers has no class for it", ""),
    "black-forest-labs/FLUX.1-Redux-dev": (find_model, "it turns an image into text states", "flux.1-dev"),
    "Wan-AI/Wan2.1-I2V-14B-720P": (find_model, "with --resolution 720x1280", "wan2.1-i2v-14b-480p"),
    "facebook/DiT-XL-2-512": (find_model, "plan it as dit-xl-2 with --resolution 512", "dit-xl-2"),
    "THUDM/CogView3": (find_model, "base and relay models are U-Nets", "cogview3-plus-3b"),
    "meituan-longcat/LongCat-Image-Edit": (find_model, "its input also has images", "longcat-image"),
    "meituan-longcat/LongCat-Video": (find_model, "bigdit has no adapter for its class yet", ""),
    "zai-org/GLM-Image": (find_model, "a token from its own language model", "cogview4-6b"),
    "briaai/FIBO": (find_model, "needs another layer of its text encoder", "bria-3.2"),
    "Lightricks/LTX-2": (find_model, "each of its blocks also needs sound", "ltx-video-0.9"),
    **dict.fromkeys(
        ("kandinskylab/Kandinsky-5.0-T2V-Lite-sft-10s-Diffusers", "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers"),
        (find_model, "those of 10 seconds attend to blocks that depend on values", "kandinsky-5-t2v-lite"),
    ),
    "kandinsky6": (find_model, "its tokens are of video and of sound", "kandinsky-5-t2v-lite"),
    "omnigen": (find_model, "it reads captions and images itself", "qwen-image-edit-plus"),
    "stable-audio-3": (find_model, "it makes sound", ""),
    "Wan-AI/Wan2.2-Animate-14B": (find_model, "faces, poses or cameras", "wan2.2-ti2v-5b"),
    "decart-ai/Lucy-Edit-Dev": (find_model, "a video to edit, in further channels", "wan2.2-ti2v-5b"),
    "rhymes-ai/Allegro": (find_model, "encodes only tiles", "cogvideox-2b"),
    "maxin-cn/Latte-1": (find_model, "its VAE encodes images, not videos", "cogvideox-2b"),
    "midjourney": (find_model, "its weights and its arguments are not published", ""),
    "mi300x": (resolve_gpu, "AMD's Instinct GPUs have no CUDA", "h200-sxm, b200"),
    **dict.fromkeys(("7900xtx", "rx7900xtx", "rx 7900 xtx"), (resolve_gpu, "AMD's GPUs have no CUDA", "")),
    "AMD Radeon RX 7900 XTX": (resolve_gpu, "AMD's GPUs have no CUDA", ""),
    "gaudi3": (resolve_gpu, "Intel's GPUs have no CUDA", ""),
    "m3 max": (resolve_gpu, "Apple's chips have no CUDA", ""),
    "tpu-v5e": (resolve_gpu, "it has no CUDA", ""),
    "Tesla P100-PCIE-16GB": (resolve_gpu, "older than Volta", "t4"),
    "GeForce RTX 4090 Laptop GPU": (resolve_gpu, "a laptop's GPU is slower", ""),
    "8xH100": (resolve_gpu, "it is a number of GPUs: use --gpus", "h100-sxm"),
    "h100x8": (resolve_gpu, "it is a number of GPUs: use --gpus", "h100-sxm"),
    "p4de.24xlarge": (resolve_gpu, "name the GPU, and --gpus 8", "a100-80g-sxm"),
    "a2-highgpu-1g": (resolve_gpu, "it is an instance of 1 to 16 GPUs", "a100-40g-sxm"),
    "80GB": (resolve_gpu, "`bigdit gpus --min-memory` lists", ""),
    "hopper": (resolve_gpu, "it means many GPUs", ""),
    **dict.fromkeys(
        ("0", "1", "0,1", "-1", "cuda:0"), (resolve_gpu, "it is a GPU's number, and a plan needs its kind", "")
    ),
    **dict.fromkeys(("cuda", "gpu"), (resolve_gpu, "--gpu auto for this machine's", "")),
    "mps": (resolve_gpu, "Apple's chips have no CUDA", ""),
    "npu": (resolve_gpu, "it has no CUDA", ""),
    **dict.fromkeys(("rtx 2080", "titan v", "b100"), (resolve_gpu, "set --gpu-memory", "0")),
    "gb200 nvl72": (resolve_gpu, "it is a rack of that many GPUs", "gb200"),
    "DGX A100": (resolve_gpu, "it is a machine of 8 GPUs", "a100-80g-sxm"),
    "colab": (resolve_gpu, "name the one that nvidia-smi shows there", "t4"),
}


@pytest.mark.parametrize("asked", REASONS)
def test_what_cannot_be_planned_is_refused_with_its_reason(asked):
    find, reason, near = REASONS[asked]
    problem = _refused(find, asked)
    assert reason in problem
    assert near in problem.partition("; nearest: ")[2]


@pytest.mark.parametrize(("kind", "known"), [("model", models()), ("gpu", gpus())])
def test_refusals_take_nothing_away_and_name_what_there_is(kind, known):
    names = {each.name for each in known}
    for refused in refusals(kind):
        assert set(refused.nearest) <= names
        assert refused.reason
        assert refused.source
        if kind == "gpu":
            assert not [each.title for each in known if re.search(refused.asked, each.name)]


DIFFUSERS = Path(find_spec("diffusers").origin).parent


def test_every_transformer_of_diffusers_is_driven_or_refused_as_one_without_adapter():
    files = DIFFUSERS.glob("models/transformers/*.py")
    defined = [
        found for file in files for found in re.findall(r"^class (\w+)\(([^)]*)", file.read_text(), re.MULTILINE)
    ]
    classes = {name for name, bases in defined if "ModelMixin" in bases}
    assert len(classes) > 70
    assert all("no adapter for its class" in refusal("model", name) for name in classes - FAMILIES.keys())
    assert not [name for name in FAMILIES if refusal("model", name)]


OTHERS = {"DiTPipeline", "PRXPixelPipeline"}
"""One has no captions, and one has no VAE."""


def test_every_pipeline_of_a_driven_transformer_is_read_or_refused_with_the_reason():
    found = set()
    for file in DIFFUSERS.glob("pipelines/**/*.py"):
        for own in re.split(r"^class ", file.read_text(), flags=re.MULTILINE)[1:]:
            driven = set(re.findall(r"^        transformer: (\w+)", own, re.MULTILINE)) & FAMILIES.keys()
            found |= set(re.findall(r"^\w+Pipeline\b", own)) if driven else set()
    assert len(found) > 80
    assert {name for name in found - RECIPES.keys() if not refusal("model", name)} == OTHERS
    assert not [name for name in RECIPES if refusal("model", name)]


def test_no_two_names_differ_by_their_hyphens_alone():
    for file, kind in (("models.json", "models"), ("gpus.json", "gpus")):
        document = load_json(file)
        plain = Counter(re.sub(r"[-/ ]", "", name) for name in document[kind])
        assert max(plain.values()) == 1


def test_repositories_are_of_models_that_there_are():
    held = load_json("models.json")["hub"]
    pairs = [(repository, name) for repository, name in held.items() if isinstance(name, str)]
    assert {name for _, name in pairs} <= {m.name for m in models()}
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", repository) for repository in held)
    assert "Tongyi-MAI/Z-Image-Turbo" in repositories("z-image")
    assert repositories("wan2.2-i2v-a14b-low")[0] == "Wan-AI/Wan2.2-I2V-A14B-Diffusers"  # which has two of them
    for repository, name in pairs:
        assert model(repository).name == model(repository.split("/")[1]).name == name
