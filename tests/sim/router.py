"""Simulates a router process: the real `Conductor`, its links to workers and its registry, without text and clients'
RPCs. Clients call `submit` on its event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.v1 import control_pb2_grpc
from services.core.ids import new_incarnation
from services.router.catalogue import Catalogue, ServedModel
from services.router.conductor import Conductor
from services.router.coordinator import Coordinator
from services.router.coordinator.canaries import new_canary
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import WorkerInfo
from services.router.front.operator.registry import RegistryServicer
from services.router.policy import Fingerprint, Role
from services.router.telemetry.timelines import Timelines, TokenTimes
from services.router.telemetry.tracing import RequestTrace
from services.router.text.model_facts import ModelFacts
from services.router.workers.sessions import SessionTimes
from tests.sim.client import SimRequest
from tests.sim.model import CANARY_SALT, VOCAB_SIZE, Truth
from tests.sim.node import Node
from tests.sim.rpc_client import SimChannel
from tests.sim.rpc_server import SimServer
from tests.sim.tracing import NullMetrics, NullTracer
from tests.sim.turns import watch_placements, watch_turns

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


_MOST_CANARIES = 400
"""Of one incarnation. More, and the cluster's `Truth` would not know their blocks, and say so."""


class SimRouter:
    """Is one incarnation of a simulated router."""

    def __init__(self, cluster: Cluster, name: str, address: str, config: CoordinatorConfig) -> None:
        self.node = Node(cluster.world, name, address)
        self.config = config
        if config.health.canaries:
            self.config = replace(config, canary_salt=f"{CANARY_SALT} {name} {cluster.world.now_s}")
            for number in range(1, _MOST_CANARIES):
                _foretell_canary(cluster.truth, f"{self.config.canary_salt}-{number}")
        self.node.inhabitant = self
        self._cluster = cluster
        self.node.loop.enter(self._build)

    def _build(self) -> None:
        node, network = self.node, self._cluster.network
        metrics: Any = _StrictMetrics(self._cluster)
        self.coordinator = Coordinator(self.config)
        self.book = self.coordinator._book
        """What invariants look into; the router's own rules are judged by it, and not by what is shown."""
        self._watch_verdicts()
        watch_placements(self._cluster.world, self.book)
        watch_turns(self._cluster.world, self.coordinator, self.book)
        self.timelines = Timelines()
        self.times = SessionTimes(heartbeat_s=0.5, silence_s=2.0)
        self.conductor = Conductor(
            self.coordinator,
            clock=node,
            metrics=metrics,
            times=self.times,
            dial=_any(lambda address: SimChannel(node, network, address)),
            incarnation=new_incarnation(),
        )
        self._server = SimServer(node, network)
        no: Any = None
        own = ServedModel(ModelFacts("sim", vocab_size=VOCAB_SIZE, max_text_bytes=0), no, self.conductor, no, no)
        self.catalogue = Catalogue(own, text_of=no, serve=no, forget=no, max_models=1, clock=node)
        registry = RegistryServicer(self.catalogue, incarnation=self.conductor.incarnation, interval_s=2.0)
        self._server.add("baton.v1.RegistryService", control_pb2_grpc.add_RegistryServiceServicer_to_server, registry)
        node.loop.create_task(self._server.start(), name="start")
        self._ticking = node.loop.create_task(self.catalogue.tick_forever(), name="tick")
        self.stopping = False
        self.admits_no_more = False

    def _watch_verdicts(self) -> None:
        """Tells the cluster's `Truth` of each epoch that this router is in."""
        self.heard_in_turn: dict[int, int] = {}
        """The turn in which it has heard of the newest verdict on each incarnation, or reached it."""
        verdicts: Any = self.coordinator.verdicts
        merge = verdicts.merge

        def watched(num_of: Mapping[int, int]) -> list[int]:
            news: list[int] = merge(num_of)
            if news:
                self.heard_in_turn.update(dict.fromkeys(news, self._cluster.world.num_turns))
                self._cluster.world.note("verdicts", self.node.name, sorted(verdicts.num_of.values()))
                self._cluster.truth.enter(verdicts.epoch)
            return news

        verdicts.merge = watched

    async def close(self) -> None:
        """Ends the router as `main` does, when the requests are over."""
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await self.conductor.close()
        await self._server.stop(1.0)

    def checks(self, worker_id: str) -> bool:
        """A canary is under way there."""
        return any(canary.involves(worker_id) for canary in self.coordinator._canaries._live)

    def serves(self, request_id: str) -> bool:
        return self.coordinator.stage_of(request_id) is not None

    @property
    def queue_is_full(self) -> bool:
        return self.coordinator.queue_share >= 1.0

    def submit(self, request: SimRequest) -> None:
        """Submits the request on this node's loop. Raises what the coordinator says."""
        trace = RequestTrace(
            NullTracer(),
            request.message,
            model_id="sim",
            parent="",
            stream=True,
            arrived_s=self.node.now(),
            timelines=self.timelines,
            times=TokenTimes(),
        )
        spec = request.spec(self.node.now(), self.coordinator.block_sizes_to_hash(), self.coordinator.verdicts.epoch)
        self.conductor.submit(spec, _any(request), trace, _any(NullMetrics()))

    def cancel(self, request: SimRequest) -> None:
        self.conductor.cancel(request.request_id, _any(request))


class _StrictMetrics(NullMetrics):
    """Ends the run at a defect that the router survives."""

    def __init__(self, cluster: Cluster) -> None:
        self._world = cluster.world

    def internal_error(self, where: str) -> None:
        self._world.fail(sys.exception() or AssertionError(f"internal error ({where})"))


def _foretell_canary(truth: Truth, name: str) -> None:
    for block_size in truth.block_sizes:
        worker = WorkerInfo(
            "", Role.MIXED, 0, Fingerprint("sim"), block_size, num_blocks=64, max_model_len=64, max_num_seqs=1
        )
        spec = new_canary(name, worker, worker, 0.0).spec
        assert spec.max_tokens is not None
        truth.add(spec.token_ids, max_tokens=spec.max_tokens, cache_salt=spec.cache_salt)


def _any(value: object) -> Any:
    return value
