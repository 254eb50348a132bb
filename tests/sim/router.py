"""A simulated router process: the real `Conductor`, its links to workers and its registry, without text and clients'
RPCs. Clients call `submit` on its event loop."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.v1 import control_pb2_grpc
from services.router.conductor import Conductor
from services.router.coordinator import Coordinator
from services.router.coordinator.canary import new_canary
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import Role, WorkerInfo
from services.router.registry import RegistryServicer
from services.router.sessions import SessionTimes
from services.router.tracing import RequestTrace
from tests.sim.client import SimRequest
from tests.sim.model import Truth
from tests.sim.node import Node
from tests.sim.rpc_client import SimChannel
from tests.sim.rpc_server import SimServer
from tests.sim.tracing import NullMetrics, NullTracer

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


_MOST_CANARIES = 400
"""Of one incarnation. More, and the cluster's `Truth` would not know their blocks, and say so."""


class SimRouter:
    """One incarnation."""

    def __init__(self, cluster: Cluster, name: str, address: str, config: CoordinatorConfig) -> None:
        self.node = Node(cluster.world, name, address)
        self.config = config
        if config.health.deep_checks:
            self.config = replace(config, canary_salt=f"{name} {cluster.world.now_s}")
            for number in range(1, _MOST_CANARIES):
                _foretell_canary(cluster.truth, f"{self.config.canary_salt}-{number}")
        self.node.inhabitant = self
        self._cluster = cluster
        self.node.loop.enter(self._build)

    def _build(self) -> None:
        node, network = self.node, self._cluster.network
        metrics: Any = NullMetrics()
        self.coordinator = Coordinator(self.config)
        self.conductor = Conductor(
            self.coordinator,
            clock=node,
            metrics=metrics,
            times=SessionTimes(heartbeat_s=0.5, silence_s=2.0),
            dial=_any(lambda address: SimChannel(node, network, address)),
        )
        self._server = SimServer(node, network)
        registry = RegistryServicer(self.conductor, model_id="sim", interval_s=2.0)
        self._server.add("baton.v1.RegistryService", control_pb2_grpc.add_RegistryServiceServicer_to_server, registry)
        node.loop.create_task(self._server.start(), name="start")
        node.loop.create_task(self.conductor.tick_forever(), name="tick")

    def submit(self, request: SimRequest) -> None:
        """On this node's loop. Raises what the coordinator says."""
        trace = RequestTrace(
            NullTracer(), request.message, model_id="sim", parent="", stream=True, arrived_s=self.node.now()
        )
        self.conductor.submit(request.spec(self.node.now()), _any(request), trace, _any(NullMetrics()))

    def cancel(self, request: SimRequest) -> None:
        self.conductor.cancel(request.request_id, _any(request))


def _foretell_canary(truth: Truth, name: str) -> None:
    worker = WorkerInfo("", Role.MIXED, 0, "", truth.block_size, num_blocks=64, max_model_len=64, max_num_seqs=1)
    spec = new_canary(name, worker, worker, 0.0).spec
    assert spec.max_tokens is not None
    truth.add(spec.token_ids, max_tokens=spec.max_tokens, cache_salt=spec.cache_salt)


def _any(value: object) -> Any:
    return value
