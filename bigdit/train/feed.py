"""What the steps of a stage are fed: features of a store, or pictures and the encoders that make them in each step."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bigdit.catalog.conditions import no_class
from bigdit.checkpoint import Peers
from bigdit.dist import World
from bigdit.encoders.fit import smaller_than_planned
from bigdit.loader.online import RunEncoders, more_than_planned, open_online
from bigdit.loader.order import Order
from bigdit.loader.raw_store import RawStore
from bigdit.loader.stream import FeatureStream
from bigdit.spec import Strategy
from bigdit.store import FeatureStore
from bigdit.store.text import cut_line, summed
from bigdit.train.encode import Encode, encode
from bigdit.train.going_on import Start
from bigdit.train.prepare import Prepared
from bigdit.train.store import open_stores


@dataclass(frozen=True)
class Feed:
    """The samples of a `store` in an `order`; `encoders` where their features are made in each step."""

    store: FeatureStore | RawStore
    encoders: RunEncoders | None
    order: Order

    def cut_here(self) -> list[str]:
        """The captions that tokenizers cut in this process, a line each."""
        return [] if self.encoders is None else [cut_line(cut, self.encoders.captions) for cut in self.encoders.cuts]

    def cut(self, peers: Peers) -> list[str]:
        """Those of all processes, which call it alike."""
        if self.encoders is None:
            return []
        found = peers.gather((self.encoders.captions, self.encoders.cuts))
        captions = sum(count for count, _ in found)
        return [cut_line(cut, captions) for cut in summed(cut for _, cuts in found for cut in cuts)]

    def encode(self, strategy: Strategy) -> Encode | None:
        """What makes features of a micro-batch; None where it has some."""
        return None if self.encoders is None else functools.partial(encode, self.encoders, strategy.encode_chunk)

    def stream(self, reached: Prepared, strategy: Strategy, world: World, device: torch.device) -> FeatureStream:
        """This process's micro-batches of the stage that was `reached`."""
        run = reached.stage.run
        return FeatureStream(
            self.store,
            world,
            self.order,
            micro_batch_size=strategy.micro_batch_size,
            grad_accum_steps=strategy.grad_accum_steps,
            seed=run.train.seed,
            caption_dropout=run.data.caption_dropout,
            no_class=no_class(reached.spec),
            read_ahead_steps=strategy.read_ahead_steps,
            threads=run.data.read_threads,
            pin_memory=device.type == "cuda",
        )


def open_feed(start: Start, device: torch.device) -> tuple[Feed, list[str]]:
    """What the stage that was reached is fed, with encoders on the device; and what a person should know of it. Raises
    UserError where it does not go with the run, the model, the plan or the checkpoint."""
    reached = start.reached
    strategy, stage = reached.strategy, reached.stage
    store: FeatureStore | RawStore
    if strategy.features == "cached":
        store, encoders = open_stores(start.stages, stage.number), None
    else:
        store, encoders = open_online(
            stage.run, reached.spec, stage.plan, device, strategy.encode_chunk or strategy.micro_batch_size
        )
    order, notices = start.order(store)
    if stage.plan is not None:
        notices += smaller_than_planned(stage.plan, store.buckets)
        notices += [] if encoders is None else more_than_planned(stage.plan, encoders)
    return Feed(store, encoders, order), notices
