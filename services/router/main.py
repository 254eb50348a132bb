"""Runs a router: configure, bind, load the tokenizer and template, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial

from starlette.types import ASGIApp

from baton.v1 import control_pb2_grpc, inference_pb2_grpc
from services.core.clock import MonotonicClock
from services.core.cluster_token import cluster_token
from services.core.errors import ConfigError
from services.core.ids import new_incarnation, new_request_id
from services.core.lifecycle import Lifecycle
from services.router.catalogue import Catalogue, ServedModel
from services.router.conductor import Conductor
from services.router.config import RouterConfig
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.coordinator import TICK_S
from services.router.coordinator.events import WorkerInfo
from services.router.front.byte_budget import ByteBudget
from services.router.front.grpc import servicer
from services.router.front.grpc.reading import ReadInterceptor
from services.router.front.http.app import guarded, make_app
from services.router.front.http.body import BodyLimits
from services.router.front.http.server import HttpServer
from services.router.front.intake import Intake
from services.router.front.validation import ModelFacts
from services.router.malloc import Trimmer, separate_large_blocks
from services.router.policy import PolicyConfig, Split
from services.router.policy.health import HealthConfig
from services.router.policy.long_prompts import LongPromptConfig
from services.router.policy.outliers import OutlierConfig
from services.router.policy_file import read_selection
from services.router.telemetry.activity import activity_log
from services.router.telemetry.metrics import RouterMetrics
from services.router.text.model_text_fetch import model_text_of
from services.router.text.tokenisation import ModelText, load_model_text
from services.router.text.tokeniser_line import TokeniserLine
from services.router.workers import control, registry
from services.router.workers.sessions import SessionTimes
from services.rpc.channels import dial
from services.rpc.logging import configure_logging
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer, configure_tracing

__all__ = ["Router", "RouterConfig", "serve"]

log = logging.getLogger(__name__)

_MAX_CONTROL_BYTES = 64 << 10
"""The largest message on the control port, in bytes: far more than a worker's description needs."""
_FETCH_TEXT_S = 30.0
"""Seconds in which a worker that brings a model must have given its tokenizer and template."""


async def serve(config: RouterConfig, lifecycle: Lifecycle) -> None:
    """Runs a router until it is told to stop."""
    configure_logging("baton-router", "router", level=config.log_level, form=config.log_format)
    separate_large_blocks()
    tracer = configure_tracing("baton-router", "router", config.trace_file or None)
    try:
        router = Router(config, tracer, cluster_token(config.cluster_token_file))
        try:
            await router.start()
            lifecycle.report_ready(
                port=router.port,
                metrics_port=router.metrics_port,
                http_port=router.http_port,
                control_port=router.control_port,
            )
            await router.serve_until(lifecycle.stopping)
            await router.drain(lifecycle.drain_s)
        finally:
            await router.stop()
    finally:
        tracer.shutdown()


class Router:
    """Runs a whole router in this process. Make it on the event loop; call `start`, perhaps `drain`, then `stop`."""

    def __init__(self, config: RouterConfig, tracer: Tracer, token: str) -> None:
        """Loads the tokenizer of its own model. `token` is the cluster token. Raises ConfigError."""
        # Several texts are tokenised at once by the router's threads; the library's own pool would use every core for
        # each.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._policies = read_selection(config.policy, config.policy_weight, config.policy_file)
        model_id = config.served_model_name or config.model.rstrip("/").rpartition("/")[2]
        clock, self._incarnation = MonotonicClock(), new_incarnation()
        self._config, self._clock = config, clock
        self._dial = partial(dial, token=token)
        self._metrics = RouterMetrics(config, instance="router")
        self.catalogue = Catalogue(
            self._serve(model_id, _own_text(config.model), _tokenizer_threads(config)),
            text_of=self._text_of,
            serve=self._serve,
            forget=self._metrics.forget,
            max_models=config.max_models,
            clock=clock,
        )
        self._vetting = asyncio.Semaphore(1)
        """Is held while a model that a worker brings is vetted, which takes a processor and memory."""
        self._trimmer = Trimmer()
        self.byte_budget = budget = ByteBudget(config.max_pending_bytes, freed=self._trimmer.soon)
        self._server = GrpcServer(
            config.host,
            config.port,
            reflects=True,
            max_request_bytes=config.max_message_bytes,
            interceptors=[ReadInterceptor(budget, config.max_text_bytes)],
            max_concurrent_rpcs=config.max_concurrent_rpcs,
            freed=self._trimmer.soon,
        )
        self._control_server = GrpcServer(
            config.control_host,
            config.control_port,
            flag="--control-port",
            token=token,
            max_request_bytes=_MAX_CONTROL_BYTES,
        )
        intake = Intake(
            clock=clock,
            tracer=tracer,
            metrics=self._metrics.requests,
            log_prompts=config.log_prompts,
        )
        self._inference = servicer.InferenceServicer(intake, self.catalogue)
        limits = BodyLimits(config.max_message_bytes, config.max_text_bytes)
        app: ASGIApp = make_app(intake, self.catalogue, self._metrics.registry, budget, limits)
        app = guarded(app, config.host, hosts=config.http_allowed_host, origins=config.http_cors_origin)
        self._http = HttpServer(app, config.host, config.http_port) if config.http_port >= 0 else None
        self._control = control.ControlServicer(self.catalogue, incarnation=self._incarnation, clock=clock)
        self._registry = registry.RegistryServicer(
            self.catalogue, incarnation=self._incarnation, interval_s=config.register_s
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def control_port(self) -> int:
        return self._control_server.port

    @property
    def control_address(self) -> str:
        return self._control_server.address

    @property
    def metrics_port(self) -> int:
        """Returns the Prometheus port; 0 without an endpoint."""
        return self._metrics.port

    @property
    def http_port(self) -> int:
        """Returns the HTTP port; 0 without HTTP."""
        return self._http.port if self._http is not None else 0

    async def start(self) -> None:
        self._server.add(servicer.FULL_NAME, inference_pb2_grpc.add_InferenceServiceServicer_to_server, self._inference)
        add = self._control_server.add
        add(control.FULL_NAME, control_pb2_grpc.add_ControlServiceServicer_to_server, self._control)
        add(registry.FULL_NAME, control_pb2_grpc.add_RegistryServiceServicer_to_server, self._registry)
        await self._server.start()
        await self._control_server.start()
        if self._http is not None:
            await self._http.start()
            self._control.http_port = self._http.port
        await self._control_server.set_ready(True)
        self._tasks = [
            asyncio.create_task(self.catalogue.tick_forever(), name="tick"),
            asyncio.create_task(self._keep_health(), name="health"),
        ]
        if self._config.log_interval_s:
            activity = activity_log(self.catalogue, self._metrics.requests, self._clock, self._config.log_interval_s)
            self._tasks.append(asyncio.create_task(activity.run(), name="activity log"))
        log.info("listening on %s, for workers and operators on %s", self.address, self.control_address)

    async def serve_until(self, stopping: asyncio.Event) -> None:
        """Returns when `stopping` is set.

        Raises if one of the router's own tasks fails: a router that cannot tick must not look alive.
        """
        waiter = asyncio.create_task(stopping.wait(), name="stopping")
        try:
            tasks = {waiter, *self._tasks, *([self._http.serving] if self._http is not None else [])}
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            waiter.cancel()

    async def drain(self, deadline_s: float) -> None:
        """Reports NOT_SERVING and takes no more requests; those that run may end within `deadline_s` seconds."""
        await self._server.set_ready(False)
        await self._control_server.set_ready(False)
        await self.catalogue.drain(deadline_s)

    async def stop(self) -> None:
        """Ends what still runs. Leaves no task or port, and no thread but those that tokenise a text just then."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.catalogue.close()
        if self._http is not None:
            await self._http.stop()
        await asyncio.gather(self._server.stop(grace_s=1.0), self._control_server.stop(grace_s=1.0))
        for model in self.catalogue.all():  # last: a text that came to a closed line would wait for ever
            model.line.close()
            await asyncio.to_thread(model.text.close)
        self._trimmer.close()
        self._metrics.close()

    @property
    def conductor(self) -> Conductor:
        """Returns the conductor of the router's own model."""
        return self.catalogue.own.conductor

    @property
    def coordinator(self) -> Coordinator:
        """Returns the coordinator of the router's own model."""
        return self.conductor.coordinator

    def _serve(self, model_id: str, text: ModelText, num_threads: int = 1) -> ServedModel:
        """Makes what serves a model, at first without workers. `num_threads` tokenise its long texts."""
        metrics, policy = self._metrics.of(model_id), self._policies.of(model_id)
        log.info("model %s: placed by %s", model_id, policy)
        conductor = Conductor(
            Coordinator(_coordinator_config(self._config, text, policy.config)),
            clock=self._clock,
            metrics=metrics,
            times=SessionTimes(self._config.heartbeat_s, self._config.silence_s),
            dial=self._dial,
            incarnation=self._incarnation,
        )
        facts = ModelFacts(model_id, text.vocab_size, self._config.max_text_bytes)
        line = TokeniserLine(num_threads, most_bytes=self._config.max_text_bytes)
        return ServedModel(facts, text, conductor, metrics.requests, line, str(policy))

    async def _text_of(self, worker: WorkerInfo) -> ModelText:
        assert worker.description is not None, "whoever registers has described itself"
        channel = self._dial(worker.description.address)
        try:
            return await model_text_of(channel, within_s=_FETCH_TEXT_S, turn=self._vetting)
        finally:
            await channel.close()

    async def _keep_health(self) -> None:
        """Keeps InferenceService SERVING while a request would find a worker, and NOT_SERVING otherwise."""
        healthy = False
        while True:
            if self.catalogue.ready != healthy:
                healthy = self.catalogue.ready
                await self._server.set_ready(healthy, servicer.FULL_NAME)
            await asyncio.sleep(TICK_S)


def _own_text(folder: str) -> ModelText:
    try:
        return load_model_text(folder)
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from error


def _coordinator_config(config: RouterConfig, text: ModelText, policy: PolicyConfig) -> CoordinatorConfig:
    return CoordinatorConfig(
        model_context_tokens=text.context_tokens,
        vocab_size=text.vocab_size,
        max_workers=config.max_workers,
        max_queue=config.max_queue,
        queue_timeout_s=config.queue_timeout_s,
        no_worker_timeout_s=config.no_worker_timeout_s,
        aging_s=config.aging_s,
        step_timeout_s=config.step_timeout_s,
        canary_salt=f"canary-{new_request_id()}",
        policy=policy,
        long_prompts=LongPromptConfig(isolation=config.isolate_long_prompts),
        outliers=OutlierConfig(slow_factor=config.slow_factor),
        split=Split(config.split),
        health=HealthConfig(canaries=config.canaries, recheck_s=config.canary_period_s, starts_slowly=True),
    )


def _tokenizer_threads(config: RouterConfig) -> int:
    """Returns the number of threads for long texts: by default half of the cores, since the event loop needs one of
    them and workers may be on the same machine.
    """
    return config.tokenizer_threads or max(1, len(os.sched_getaffinity(0)) // 2)
