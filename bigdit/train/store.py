"""The run's store of features, held against its model, its encoders and its plan before a step is taken."""

from __future__ import annotations

import math

import torch

from bigdit.config import RunConfig
from bigdit.config.plan_file import PlanFile
from bigdit.encoders.fit import latent_misfits, plan_misfits, run_misfits, text_misfits
from bigdit.errors import UserError
from bigdit.spec import BatchShape, ModelSpec
from bigdit.store import FeatureStore


def open_store(run: RunConfig, spec: ModelSpec, plan: PlanFile | None) -> FeatureStore:
    """The store. Raises UserError where its features are not what the model takes, the run says or the plan is for."""
    store = FeatureStore.open(run.data.features, run.data.reader, run.data.remote_cache)
    null = store.null_text
    pooled_dim = None if null.pooled is None else len(null.pooled)
    problems = [
        *(f"its latents have {misfit}" for misfit in latent_misfits(spec, next(iter(store.buckets))[0])),
        *(f"its text has {misfit}" for misfit in text_misfits(spec, null.states.shape[1], pooled_dim)),
        *run_misfits(run, store.schema),
        *(plan_misfits(plan, store.buckets, store.max_tokens) if plan is not None else ()),
    ]
    encoder, asked = store.schema.text_encoder, run.encoders.text.tokens_asked
    most = encoder.get("max_sequence_length", encoder["max_tokens"])
    if asked not in (None, most):
        problems.append(f"its text has at most {most} tokens, and encoders.text.max_tokens is {asked}")
    if problems:
        raise UserError(*(f"data.features: {store.root} does not fit: {problem}" for problem in problems))
    return store


def largest_batch_shape(store: FeatureStore) -> BatchShape:
    """Shapes of the largest bucket in a feature store, with text of its max_tokens."""
    latents = max(store.buckets, key=math.prod)
    wide = store.has_deviation or store.latents_dtype == torch.float32
    text = (store.max_tokens, store.null_text.states.shape[1])
    return BatchShape(latents=latents, latents_dtype="fp32" if wide else "bf16", text=text)
