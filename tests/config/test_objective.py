"""A run's objective: its default, and which settings exclude each other, by the key to change."""

import pytest
from commands import DIGITS

from bigdit.catalog import model, models
from bigdit.catalog.families import FAMILIES, PUBLISHED, objective_of
from bigdit.catalog.resolve import model_spec
from bigdit.config.check import check
from bigdit.config.stages import load_run
from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, ExponentialShift, FlowMatchingSpec
from bigdit.profile.attempt import StepRequest
from bigdit.strategy import BatchShape, Strategy


def problem(*overrides):
    def load_and_check():
        run = load_run(DIGITS, overrides)
        check(run, model_spec(run.model))

    with pytest.raises(UserError) as caught:
        load_and_check()
    (found,) = caught.value.problems
    return found.removeprefix(f"{DIGITS}: ").removeprefix(f"{DIGITS} with --set: ")


def test_models_are_trained_as_their_authors_did():
    own = {name: objective_of(model_spec_of(name), None) for name in FAMILIES}
    ddpm = {"DiTTransformer2DModel", "PaperDiT", "PixArtTransformer2DModel"}
    assert {name for name, objective in own.items() if objective == DdpmSpec()} == ddpm
    flow = FAMILIES.keys() - ddpm - {"HunyuanDiT2DModel", "CogView3PlusTransformer2DModel"}
    assert {name for name, objective in own.items() if objective == FlowMatchingSpec()} == flow
    hunyuan = [objective_of(model(name).spec, None) for name in ("hunyuandit-v1.2", "hunyuandit-v1.1")]
    assert {(each.prediction, each.betas, each.beta_start) for each in hunyuan} == {("v", "scaled_linear", 0.00085)}
    assert [each.beta_end for each in hunyuan] == [0.018, 0.03]
    assert own["HunyuanDiT2DModel"] == hunyuan[1]  # its class takes a style if nothing is said
    shifted = {name: objective_of(model(name).spec, None).shift for name in ("sd3.5-large", "flux.1-dev", "lumina-2")}
    assert shifted == {"sd3.5-large": 3.0, "flux.1-dev": ExponentialShift(), "lumina-2": 1.0}
    assert PUBLISHED.keys() <= {each.name for each in models.models()}
    asked = FlowMatchingSpec(shift=2.0)
    assert objective_of(model_spec_of("PaperDiT"), asked) is asked


def model_spec_of(class_name):
    return models.model("dit-s-2").spec.model_copy(update={"class_name": class_name})


def test_a_request_has_the_objective_of_its_model_through_json_too():
    for name, expected in (("dit-s-2", DdpmSpec()), ("sana-600m", FlowMatchingSpec())):
        request = StepRequest(
            model=models.model(name).spec,
            batch=BatchShape(latents=(4, 8, 8)),
            strategy=Strategy(),
        )
        assert request.objective == expected
        assert StepRequest.model_validate_json(request.model_dump_json()) == request


def test_keys_without_a_name_are_of_flow_matching():
    run = load_run(DIGITS, ["objective.shift=3"])
    assert run.objective == FlowMatchingSpec(shift=3.0)
    assert load_run(DIGITS).objective is None
    by_tokens = load_run(DIGITS, ["objective.shift={name: sqrt, base_tokens: 16}"]).objective
    assert by_tokens.shift.base_tokens == 16


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["objective.name=ddmp"],
            "objective.name is 'ddmp', which is unknown; did you mean ddpm?",
        ),
        (["objective.prediction=v"], "objective.prediction: unknown key; flow_matching has no such key; ddpm has it"),
        (
            ["objective={name: ddpm, shift: 3}"],
            "objective.shift: unknown key; ddpm has no such key; flow_matching has it",
        ),
        (
            ["objective={name: ddpm, betas: cosine}"],
            "objective.betas is 'cosine', which is unknown; did you mean squaredcos_cap_v2?",
        ),
        (
            ["objective.shift={name: linear}"],
            "objective.shift.name is 'linear', which is unknown; known: exponential, sqrt",
        ),
        (
            ["objective={t_distribution: uniform, mode_scale: 1}"],
            "objective.mode_scale is 1, and objective.t_distribution is uniform; it is for mode: leave it out",
        ),
        (
            ["objective={t_distribution: uniform, mode_scale: 1.29}"],  # its default
            "objective.mode_scale is 1.29, and objective.t_distribution is uniform; it is for mode: leave it out",
        ),
        (
            ["objective={name: ddpm, p2_k: 1}"],
            "objective.p2_k is 1, and objective.p2_gamma is missing, which it belongs to; set both",
        ),
        (
            ["objective={t_distribution: mode, logit_std: 2}"],
            "objective.logit_std is 2, and objective.t_distribution is mode; it is for logit_normal: leave it out",
        ),
        (
            ["objective={name: ddpm, betas: squaredcos_cap_v2, beta_end: 0.5}"],
            "objective.beta_end is 0.5, and objective.betas is squaredcos_cap_v2; it is for linear and scaled_linear: "
            "leave it out",
        ),
        (
            ["objective={name: ddpm, min_snr_gamma: 5, p2_k: 3}"],
            "objective.p2_k is 3, and objective.p2_gamma is missing, which it belongs to; set both",
        ),
        (
            ["objective.name=ddpm", "objective.predicts=v"],
            "objective.predicts: unknown key; did you mean prediction",
        ),
        (["objective.shift=none"], "objective.shift is 'none', and a number was expected"),
        (
            ["objective.shift={name: exponential, base_tokens: 9, max_tokens: 9}"],
            "objective.shift: max_tokens is 9, and more than base_tokens 9 is needed",
        ),
        (
            ["objective={name: ddpm, zero_terminal_snr: true}"],
            "objective: zero_terminal_snr leaves noise alone in the last timestep, which says nothing of the image "
            "where prediction is epsilon; set prediction to v",
        ),
        (
            ["objective={name: ddpm, min_snr_gamma: 5, p2_gamma: 1}"],
            "objective: min_snr_gamma and p2_gamma both weigh the loss; set one of them",
        ),
        (
            ["objective={name: ddpm, beta_end: 0.00001}"],
            "objective: beta_end is 1e-05, below beta_start 0.0001; noise grows",
        ),
        (
            ["objective={name: ddpm, timesteps: 100000}"],
            "objective: 100000 timesteps with betas from 0.0001 to 0.02 leave nothing of the image long before the "
            "last; set fewer timesteps, or a smaller beta_end",
        ),
        (
            ["objective={name: ddpm, learned_variance: true}"],
            "objective.learned_variance is true, and the model's out_channels is 4: with a variance it is 8, twice "
            "in_channels; set it to that, or objective.learned_variance to false",
        ),
    ],
)
def test_what_is_wrong_is_reported_by_its_key(overrides, line):
    assert problem(*overrides).startswith(line)
