"""The models that a router serves: its own, and those that workers have brought.

Each model has a text side, and a conductor with workers, a queue and a health record of its own: a worker serves one
model, so requests of different models never wait for one another. One model is the simple case of several.

Owns: which models there are, by name, and which of them a worker's registration belongs to. Never: placement, requests.

A worker of a model that is not known brings it: the router fetches the tokenizer, the chat template and the
configuration from the worker, and serves the model from then on, also while none of its workers is there. There are at
most `max_models`; a new one takes the place of one that has no workers, never of the router's own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.core.errors import Overloaded, UnknownModel, UnknownWorker, WorkerIdInUse
from services.router.conductor import Conductor
from services.router.coordinator.events import WorkerInfo
from services.router.token_texts import TokenTexts
from services.router.tokenisation import ModelText
from services.router.validation import ModelFacts

if TYPE_CHECKING:
    from baton.v1 import control_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ServedModel:
    facts: ModelFacts
    text: ModelText
    conductor: Conductor
    created_s: float = field(default_factory=time.time)
    """Wall clock, for clients."""

    @property
    def model_id(self) -> str:
        return self.facts.model_id

    @property
    def ready(self) -> bool:
        """Returns whether a request would find a worker."""
        return self.conductor.coordinator.ready

    @property
    def context_tokens(self) -> int:
        """Returns the longest sequence that one of its workers could hold, or else the model itself."""
        return self.conductor.coordinator.context_tokens()

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.text.tokenizer)

    def has_worker(self, worker_id: str) -> bool:
        """Returns whether the worker has a session here: only that shows that a process lives."""
        coordinator = self.conductor.coordinator
        return worker_id in coordinator.worker_ids() and coordinator.worker(worker_id).has_session


TextOf = Callable[["control_pb2.WorkerDescription"], Awaitable[ModelText]]
"""Fetches the text side of a worker's model. Raises a typed error."""
Serve = Callable[[str, ModelText], ServedModel]


class Catalogue:
    """Make it on the event loop, with the router's own model; call `close` at the end."""

    def __init__(
        self, own: ServedModel, *, text_of: TextOf, serve: Serve, forget: Callable[[str], None], max_models: int
    ):
        """`serve` makes the entry of a new model; `forget` is told the name of one that is served no longer."""
        self.own = own
        self._models = {own.model_id: own}
        self._text_of = text_of
        self._serve = serve
        self._forget = forget
        self._max_models = max_models
        self._learning: dict[str, asyncio.Task[ServedModel]] = {}

    def all(self) -> list[ServedModel]:
        """Returns the models in the order in which they came, the router's own first."""
        return list(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """Returns the model of that name; for None, the router's own. Raises UnknownModel."""
        if name is None:
            return self.own
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"model {name!r} is not served; {self._served()}")
        return model

    def with_worker(self, worker_id: str) -> ServedModel:
        """Returns the model that the worker serves. Raises UnknownWorker."""
        known = [model for model in self.all() if worker_id in model.conductor.coordinator.worker_ids()]
        if not known:
            raise UnknownWorker(f"no worker {worker_id!r}")
        return next((model for model in known if model.has_worker(worker_id)), known[0])

    @property
    def ready(self) -> bool:
        """Returns whether a request for some model would find a worker."""
        return any(model.ready for model in self._models.values())

    # Workers

    async def register(self, worker: control_pb2.WorkerDescription, info: WorkerInfo) -> None:
        """Takes a worker's registration, which may bring a model.

        Raises WorkerIdInUse if a worker of that name serves another model now, what `Conductor.register` does, and what
        fetching the model's text raises.
        """
        model_id = worker.layout.model_id
        for other in self.all():
            if other.model_id != model_id and other.has_worker(info.worker_id):
                raise WorkerIdInUse(f"worker {info.worker_id!r} serves {other.model_id!r}, and it lives")
        model = self._models.get(model_id) or await self._learn(worker)
        model.conductor.register(info)

    async def _learn(self, worker: control_pb2.WorkerDescription) -> ServedModel:
        """Several workers of a new model wait for one attempt, which goes on when they wait no longer."""
        model_id = worker.layout.model_id
        task = self._learning.get(model_id)
        if task is None:
            self._see_to_room(model_id)
            task = asyncio.create_task(self._fetch(worker), name=f"learn model {model_id}")
            self._learning[model_id] = task
            task.add_done_callback(lambda done: self._learned(model_id, done))
        return await asyncio.shield(task)

    async def _fetch(self, worker: control_pb2.WorkerDescription) -> ServedModel:
        text = await self._text_of(worker)
        model = self._models[worker.layout.model_id] = self._serve(worker.layout.model_id, text)
        log.info("model %s: brought by worker %s", model.model_id, worker.worker_id)
        return model

    def _learned(self, model_id: str, task: asyncio.Task[ServedModel]) -> None:
        del self._learning[model_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("model %s: its text could not be fetched: %s", model_id, error)

    def _see_to_room(self, model_id: str) -> None:
        if len(self._models) + len(self._learning) < self._max_models:
            return
        idle = [each for each in self.all() if each is not self.own and not each.conductor.in_use]
        if not idle:
            raise Overloaded(
                f"model {model_id!r} is not served; {self._served()}, and no more models may be (--max-models)"
            )
        gone = idle[0]
        gone.conductor.coordinator.stop_admission()  # a request that has just found it must not wait there for ever
        del self._models[gone.model_id]
        self._forget(gone.model_id)
        log.info("model %s: served no longer, it has no workers", gone.model_id)

    def _served(self) -> str:
        names = ", ".join(repr(model_id) for model_id in self._models)
        return f"{names} {'is' if len(self._models) == 1 else 'are'}"

    # Time and the end

    def tick(self) -> None:
        for model in self.all():
            model.conductor.tick()

    async def drain(self, deadline_s: float) -> None:
        """Admits no more requests, and waits for those under way, at most `deadline_s` seconds."""
        await asyncio.gather(*(model.conductor.drain(deadline_s) for model in self.all()))

    async def close(self) -> None:
        """Fails the requests that still live and ends every session. Leaves no task."""
        for task in list(self._learning.values()):
            task.cancel()
        await asyncio.gather(*self._learning.values(), return_exceptions=True)
        await asyncio.gather(*(model.conductor.close() for model in self.all()))
