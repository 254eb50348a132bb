"""Runs a router: configure, bind, load the model's text side, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from baton.v1 import control_pb2_grpc, inference_pb2_grpc
from services.core.clock import MonotonicClock
from services.core.ids import new_request_id
from services.core.lifecycle import Lifecycle
from services.router import control, registry, servicer
from services.router.conductor import TICK_S, Conductor
from services.router.config import RouterConfig
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.health import HealthConfig
from services.router.http.app import make_app
from services.router.http.server import HttpServer
from services.router.intake import Intake, ServedModel
from services.router.metrics import RouterMetrics
from services.router.sessions import SessionTimes
from services.router.tokenisation import load_model_text
from services.router.validation import ModelFacts
from services.rpc.logging import configure_logging
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer, configure_tracing

__all__ = ["Router", "RouterConfig", "serve"]

log = logging.getLogger(__name__)

_TOKENISER_THREADS = 2


async def serve(config: RouterConfig, lifecycle: Lifecycle) -> None:
    """Runs until told to stop."""
    configure_logging("baton-router", "router", level=config.log_level, form=config.log_format)
    tracer = configure_tracing("baton-router", "router", config.trace_file or None)
    try:
        router = Router(config, tracer)
        try:
            await router.start()
            lifecycle.report_ready(port=router.port, metrics_port=router.metrics_port, http_port=router.http_port)
            await router.serve_until(lifecycle.stopping)
            await router.drain(lifecycle.drain_s)
        finally:
            await router.stop()
    finally:
        tracer.shutdown()


class Router:
    """A whole router in this process. Made on the event loop; `start`, then perhaps `drain`, then `stop`."""

    def __init__(self, config: RouterConfig, tracer: Tracer) -> None:
        """Loads the tokenizer. Raises ConfigError."""
        model_id = config.served_model_name or config.model.rstrip("/").rpartition("/")[2]
        clock = MonotonicClock()
        model = _served(config.model, model_id)
        self.coordinator = Coordinator(
            CoordinatorConfig(
                model_context_tokens=model.text.context_tokens,
                vocab_size=model.text.vocab_size,
                max_queue=config.max_queue,
                queue_timeout_s=config.queue_timeout_s,
                no_worker_timeout_s=config.no_worker_timeout_s,
                step_timeout_s=config.step_timeout_s,
                canary_salt=f"canary-{new_request_id()}",
                health=HealthConfig(deep_checks=config.canaries),
            )
        )
        self._metrics = RouterMetrics(config, model_id, instance="router")
        times = SessionTimes(config.heartbeat_s, config.silence_s)
        self.conductor = Conductor(self.coordinator, clock=clock, metrics=self._metrics, times=times)
        self._executor = ThreadPoolExecutor(_TOKENISER_THREADS, thread_name_prefix="tokenise")
        self._server = GrpcServer(config.host, config.port, max_request_bytes=config.max_message_bytes)
        intake = Intake(
            self.conductor,
            model,
            clock=clock,
            tracer=tracer,
            metrics=self._metrics.requests,
            executor=self._executor,
            log_prompts=config.log_prompts,
        )
        self._inference = servicer.InferenceServicer(intake, self.coordinator)
        app = make_app(intake, self.coordinator, self._metrics.registry, max_body_bytes=config.max_message_bytes)
        self._http = HttpServer(app, config.host, config.http_port) if config.http_port >= 0 else None
        self._control = control.ControlServicer(self.conductor, model_id=model_id, clock=clock)
        self._registry = registry.RegistryServicer(self.conductor, model_id=model_id, interval_s=config.register_s)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def metrics_port(self) -> int:
        """0 without an endpoint."""
        return self._metrics.port

    @property
    def http_port(self) -> int:
        """0 without HTTP."""
        return self._http.port if self._http is not None else 0

    async def start(self) -> None:
        add = self._server.add
        add(servicer.FULL_NAME, inference_pb2_grpc.add_InferenceServiceServicer_to_server, self._inference)
        add(control.FULL_NAME, control_pb2_grpc.add_ControlServiceServicer_to_server, self._control)
        add(registry.FULL_NAME, control_pb2_grpc.add_RegistryServiceServicer_to_server, self._registry)
        await self._server.start()
        if self._http is not None:
            await self._http.start()
            self._control.http_port = self._http.port
        await self._server.set_ready(True, control.FULL_NAME, registry.FULL_NAME)
        self._tasks = [
            asyncio.create_task(self.conductor.tick_forever(), name="tick"),
            asyncio.create_task(self._keep_health(), name="health"),
        ]
        log.info("listening on %s", self.address)

    async def serve_until(self, stopping: asyncio.Event) -> None:
        """Raises if one of the router's own tasks fails: a router that cannot tick must not look alive."""
        waiter = asyncio.create_task(stopping.wait(), name="stopping")
        try:
            tasks = {waiter, *self._tasks, *([self._http.serving] if self._http is not None else [])}
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            waiter.cancel()

    async def drain(self, deadline_s: float) -> None:
        """NOT_SERVING, nothing new; what runs may end in its time."""
        await self._server.set_ready(False)
        await self.conductor.drain(deadline_s)

    async def stop(self) -> None:
        """Ends what still runs. Leaves no task, thread or port."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.conductor.close()
        if self._http is not None:
            await self._http.stop()
        await self._server.stop(grace_s=1.0)
        self._executor.shutdown()
        self._metrics.close()

    async def _keep_health(self) -> None:
        """InferenceService serves while a request would find a worker."""
        healthy = False
        while True:
            if self.coordinator.ready != healthy:
                healthy = self.coordinator.ready
                await self._server.set_ready(healthy, servicer.FULL_NAME)
            await asyncio.sleep(TICK_S)


def _served(directory: str, model_id: str) -> ServedModel:
    text = load_model_text(directory)
    longest_token_chars = max(map(len, text.tokenizer.get_vocab()), default=1)
    facts = ModelFacts(model_id, text.vocab_size, text.context_tokens, longest_token_chars)
    return ServedModel(text, facts)
