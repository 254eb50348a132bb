"""Keeps the models that a router serves: its own, and those that workers have brought.

Each model has a text side, and a conductor with workers, a queue and health records of its own: a worker serves one
model, so requests of different models never wait for one another. One model is the simple case of several.

Owns: which models there are, by name, and which of them a worker's registration belongs to. Never: placement, requests.

A worker of a model that is not known brings it: the router fetches the tokenizer, the chat template and the
configuration from the worker, and serves the model from then on. There are at most `max_models`. A model that was
brought is served no longer once all its workers have been forgotten for a while; the router's own stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.core.clock import Clock
from services.core.errors import BatonError, Draining, NoWorker, Overloaded, UnknownModel, UnknownWorker, unforeseen
from services.router.conductor import Conductor
from services.router.coordinator.coordinator import TICK_S
from services.router.coordinator.events import LoadingWorker, WorkerInfo
from services.router.coordinator.request import Phase
from services.router.policy import Role
from services.router.telemetry.request_metrics import ModelMetrics
from services.router.tenants.tenant import OPEN, Tenant
from services.router.text.model_facts import ModelFacts
from services.router.text.token_texts import TokenTexts
from services.router.text.tokenisation import ModelText
from services.router.text.tokeniser_line import TokeniserLine

log = logging.getLogger(__name__)

UNUSED_S = 60.0
"""How long a model that was brought is served without a worker that is known, in seconds."""
FAILURE_PAUSE_S = 5.0
"""Between two attempts to have a model's text from a worker of the same name, in seconds: up to 64 MiB are fetched and
read each time."""
_PATIENCE_S = 1.0
"""How long a worker that registers waits for the text of its model, in seconds: less than it waits for an answer."""
_MOST_REMEMBERED = 64
_MOST_NAMED = 32


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BatonError
    until_s: float
    """The same worker is not asked again before."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """Describes one model: what clients may ask of it, and who answers."""

    facts: ModelFacts
    text: ModelText
    conductor: Conductor
    metrics: ModelMetrics
    line: TokeniserLine
    """The model's own threads for texts: the time that its chat template takes is at the cost of its requests."""
    policy: str = ""
    """What its requests are placed by, in words."""
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

    @property
    def token_texts(self) -> TokenTexts:
        return self.text.token_texts


TextOf = Callable[[WorkerInfo], Awaitable[ModelText]]
"""Fetches the text side of a worker's model. Raises a typed error."""
Serve = Callable[[str, ModelText], ServedModel]
"""Makes what serves the model of that name, at first without workers."""


class Catalogue:
    """Keeps the models that are served. Make it on the event loop, with the router's own model; call `close` at the
    end."""

    def __init__(
        self,
        own: ServedModel,
        *,
        text_of: TextOf,
        serve: Serve,
        forget: Callable[[str], None],
        max_models: int,
        clock: Clock,
    ) -> None:
        """`text_of` and `serve` make the entry of a model that a worker brings; `forget` is told the name of one that
        is served no longer. `max_models` counts the router's own too."""
        self.own = own
        self._models = {own.model_id: own}
        self._text_of = text_of
        self._serve = serve
        self._forget = forget
        self._max_models = max_models
        self._clock = clock
        self._stopping = False
        self._learning: dict[str, asyncio.Task[ServedModel]] = {}
        self._failures: dict[tuple[str, str], _Failure] = {}
        """The newest failed attempts, by model and the name of the worker whose text could not be had, the oldest
        first. An incarnation would not do: a worker can have as many as it likes."""
        self._unused_since_s: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def all(self) -> list[ServedModel]:
        """Returns the models in the order in which they came, the router's own first."""
        return list(self._models.values())

    def get(self, name: str | None, tenant: Tenant = OPEN) -> ServedModel:
        """Returns the model of that name; for None, the router's own.

        Raises UnknownModel, or ModelNotAllowed: of a model that it may not use, a tenant does not learn whether it is
        served.
        """
        tenant.demand_model(self.own.model_id if name is None else name)
        if name is None:
            return self.own
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"model {name!r} is not served; {self._served(tenant)}")
        return model

    def phases(self) -> Counter[Phase]:
        """Returns how many requests of all models are in each phase."""
        return sum((model.conductor.coordinator.phases() for model in self.all()), Counter[Phase]())

    def with_worker(self, worker_id: str) -> ServedModel:
        """Returns the model that the worker serves. Raises UnknownWorker."""
        for model in self.all():
            if worker_id in model.conductor.coordinator.workers:
                return model
        raise UnknownWorker(f"no worker {worker_id!r}; {self._workers()}")

    @property
    def ready(self) -> bool:
        """Returns whether a request for some model would find a worker."""
        return any(model.ready for model in self._models.values())

    @property
    def stopping(self) -> bool:
        """Returns whether it takes no more requests for good."""
        return self._stopping

    # Workers

    async def register(self, info: WorkerInfo) -> None:
        """Takes a worker's registration, which may bring a model.

        Raises WorkerIdInUse while a worker of that name serves another model, UnknownModel if a store keeps one that is
        not served, what `Conductor.register` does, and what
        fetching the model's text raises.
        """
        model = self._models.get(info.model_id)
        if model is None and info.roles is Role.STORE:
            raise UnknownModel(f"model {info.model_id!r} is not served; {self._served()}, and a store brings none")
        model = model or await self._learn(info)
        others = [each.conductor for each in self.all() if each is not model]
        for other in others:  # after the wait: another process of that name may have come meanwhile
            other.coordinator.check_gone(info.worker_id)
        model.conductor.register(info)
        for other in others:  # only now: a worker that may not join takes no name away
            other.withdraw(info.worker_id)

    def loading(self, worker: LoadingWorker, model_id: str) -> None:
        """Takes what a worker says that loads a model. One that is not served it brings only when it serves, with its
        text."""
        if (model := self._models.get(model_id)) is not None:
            model.conductor.coordinator.worker_loading(worker, self._clock.now())

    async def _learn(self, info: WorkerInfo) -> ServedModel:
        """Returns the worker's model once its text is fetched. Several workers of one model wait for one attempt, which
        goes on when they no longer do: each waits for a short while, and is then told to come again."""
        name = info.model_id
        if self._stopping:
            raise Draining("the router is stopping")
        failure = self._failures.get((name, info.worker_id))
        if failure is not None and self._clock.now() < failure.until_s:
            raise failure.error.with_traceback(None)
        task = self._learning.get(name)
        if task is None:
            if len(self._models) + len(self._learning) >= self._max_models:
                raise Overloaded(
                    f"model {name!r} is not served; {self._served()}, and no more than {self._max_models} models may be"
                )
            task = asyncio.create_task(self._fetch(info), name=f"learn model {name}")
            self._learning[name] = task
            task.add_done_callback(lambda done: self._learned(info, done))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.shield(task)
        except TimeoutError:
            raise NoWorker(f"the router is fetching the text of model {name!r}", retry_after_s=_PATIENCE_S) from None

    async def _fetch(self, info: WorkerInfo) -> ServedModel:
        text = await self._text_of(info)
        if self._stopping:
            raise Draining("the router is stopping")
        model = self._models[info.model_id] = self._serve(info.model_id, text)
        log.info("model %s: brought by worker %s", model.model_id, info.worker_id)
        return model

    def _learned(self, info: WorkerInfo, task: asyncio.Task[ServedModel]) -> None:
        name, key = info.model_id, (info.model_id, info.worker_id)
        del self._learning[name]
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._failures.pop(key, None)
            return
        if not isinstance(error, BatonError):
            error = unforeseen(error) if isinstance(error, Exception) else BatonError(type(error).__name__)
        before = self._failures.pop(key, None)
        if before is None or str(before.error) != str(error):
            log.warning("model %s: it cannot be served: %s", name, error)
        if len(self._failures) >= _MOST_REMEMBERED:
            del self._failures[next(iter(self._failures))]
        self._failures[key] = _Failure(error, self._clock.now() + FAILURE_PAUSE_S)

    def _workers(self) -> str:
        workers = (worker for model in self.all() for worker in model.conductor.coordinator.workers.all())
        known = sorted(worker.info.worker_id for worker in workers)
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        return (
            f"there {'is' if len(known) == 1 else 'are'} {', '.join(known[:_MOST_NAMED])}{more}"
            if known
            else "there is none"
        )

    def _served(self, tenant: Tenant = OPEN) -> str:
        served = [repr(model_id) for model_id in self._models if tenant.may_use(model_id)]
        return f"{', '.join(served) or 'none'} {'are' if len(served) > 1 else 'is'}"

    # Time and the end

    async def tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Does the timed work of all models. Called every TICK_S. A defect met with one model is counted, and does not
        keep the others from their turn."""
        now = self._clock.now()
        for model in self.all():
            with model.conductor.isolated("tick"):
                self._tick(model, now)

    def _tick(self, model: ServedModel, now: float) -> None:
        model.conductor.tick()
        if model is self.own or model.conductor.in_use:
            self._unused_since_s.pop(model.model_id, None)
        elif now - self._unused_since_s.setdefault(model.model_id, now) >= UNUSED_S:
            self._drop(model)

    def _drop(self, model: ServedModel) -> None:
        name = model.model_id
        # A request that has just found it must not wait there for ever.
        model.conductor.coordinator.stop_admission(UnknownModel(f"model {name!r} is served no longer"))
        del self._models[name], self._unused_since_s[name]
        closing = asyncio.create_task(model.conductor.close(), name=f"close model {name}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        log.info("model %s: served no longer, it has no workers", name)
        model.line.close()
        self._forget(name)

    async def drain(self, deadline_s: float) -> None:
        """Admits no more requests and models, and waits for requests under way, at most `deadline_s` seconds."""
        self._stopping = True
        await asyncio.gather(*(model.conductor.drain(deadline_s) for model in self.all()))

    async def close(self) -> None:
        """Fails the requests that still live and ends every session. Leaves no task."""
        self._stopping = True
        learning = list(self._learning.values())
        for task in learning:
            task.cancel()
        await asyncio.gather(*learning, return_exceptions=True)
        await asyncio.gather(*(model.conductor.close() for model in self.all()), *self._closing)
