"""Runs a router: configure, bind, load the tokenizer and template, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from functools import partial

from prometheus_client import Counter
from starlette.types import ASGIApp

from baton.v1 import control_pb2_grpc, inference_pb2_grpc
from services.core.addresses import bare_host, is_loopback, join
from services.core.clock import Clock, MonotonicClock
from services.core.errors import ConfigError
from services.core.garbage import collect_rarely
from services.core.ids import new_incarnation, new_request_id
from services.core.lifecycle import Lifecycle
from services.core.run_delay import RunDelay
from services.core.start_progress import StartProgress
from services.router.activity import activity_log
from services.router.catalogue import Catalogue, ServedModel
from services.router.conductor import Conductor
from services.router.config import RouterConfig
from services.router.console.routes import make_console
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.coordinator import TICK_S
from services.router.coordinator.events import WorkerInfo
from services.router.front.call import ByteBudget
from services.router.front.grpc import servicer
from services.router.front.grpc.key import KeyInterceptor
from services.router.front.grpc.reading import ReadInterceptor
from services.router.front.http.app import guarded, make_app
from services.router.front.http.body import BodyLimits
from services.router.front.http.server import HttpServer
from services.router.front.intake import Intake
from services.router.front.operator import control, registry
from services.router.malloc import Trimmer, separate_large_blocks
from services.router.policy import PolicyConfig
from services.router.policy.health import HealthConfig
from services.router.telemetry.json_lines import JsonLines
from services.router.telemetry.metrics import RouterMetrics
from services.router.telemetry.request_log import RequestLog
from services.router.telemetry.slo import Objectives
from services.router.telemetry.timelines import Timelines
from services.router.telemetry.usage import UsageLog
from services.router.tenants.gate import Gate
from services.router.tenants.limit_store import LimitStore
from services.router.text.model_facts import ModelFacts
from services.router.text.model_text_fetch import model_text_of
from services.router.text.output.choice import ParserChoice
from services.router.text.output.families import REASONING_PARSERS, TOOL_PARSERS, forms_of
from services.router.text.tokenisation import ModelText, load_model_text
from services.router.text.tokeniser_line import TokeniserLine
from services.router.workers.sessions import SessionTimes
from services.rpc.authentication import WORKER
from services.rpc.channels import dial
from services.rpc.logging import configure_logging
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer, configure_tracing

__all__ = ["Router", "RouterConfig", "serve"]

log = logging.getLogger(__name__)

_ANYONE = (
    "ANYONE WHO REACHES %s MAY USE ALL OF THIS ROUTER: it asks for no keys (--tenants), nor for certificates "
    "(--tls-client-ca)%s"
)
_AND_IN_THE_CLEAR = ", and prompts and answers cross the network in the clear"
_IN_THE_CLEAR = (
    "keys, prompts and answers cross the network IN THE CLEAR on their way to %s: give --public-tls-cert, or put TLS "
    "in front of it"
)
_MAX_CONTROL_BYTES = 64 << 10
"""The largest message on the control port, in bytes: far more than a worker's description needs."""
_SHARES_EVERY_S = 0.2
"""How soon it shows in a tenant's limits that a worker has told of another number of routers."""
_FETCH_TEXT_S = 30.0
"""Seconds in which a worker that brings a model must have given its tokenizer and template."""


async def serve(config: RouterConfig, lifecycle: Lifecycle) -> None:
    """Runs a router until it is told to stop."""
    if config.tenants:  # a signal that comes before they are read asks for nothing more
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    configure_logging("baton-router", "router", level=config.log_level, form=config.log_format)
    separate_large_blocks()
    tracer = configure_tracing("baton-router", "router", config.trace_file or None)
    lifecycle.report_progress(StartProgress("load", "tokenizer"))
    try:
        router = Router(config, tracer, config.token())
        try:
            if config.tenants:  # else the signal ends the process, as it does any other
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router.gate.reload_soon)
            await router.start()
            collect_rarely()
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

    def __init__(self, config: RouterConfig, tracer: Tracer, token: str | None, clock: Clock | None = None) -> None:
        """Loads the tokenizer of its own model, and certificates. `token` is the cluster token. Raises ConfigError."""
        # Several texts are tokenised at once by the router's threads; the library's own pool would use every core for
        # each.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._policies = config.selection()
        self._tool_parsers = ParserChoice("--tool-parser", config.tool_parser, TOOL_PARSERS)
        self._reasoning_parsers = ParserChoice("--reasoning-parser", config.reasoning_parser, REASONING_PARSERS)
        model_id = config.served_model_name or config.model.rstrip("/").rpartition("/")[2]
        clock, self._incarnation = clock or MonotonicClock(), new_incarnation()
        self._config, self._clock = config, clock
        self._certificates, self._public_certificates = config.certificates(), config.public_certificates()
        self._dial = partial(dial, token=token, certificates=self._certificates, role=WORKER)
        self._metrics = RouterMetrics(
            config,
            instance="router",
            certificates=self._certificates,
            public_certificates=self._public_certificates,
        )
        self.catalogue = Catalogue(
            self._serve(model_id, _own_text(config.model), tokenizer_threads(config)),
            text_of=self._text_of,
            serve=self._serve,
            forget=self._metrics.forget,
            max_models=config.max_models,
            clock=clock,
        )
        self.gate = gate = Gate(config.tenants, clock)
        self._lines: list[JsonLines] = []
        usage_lines = self._open_lines("usage_log", self._metrics.usage_dropped)
        request_lines = self._open_lines("request_log", self._metrics.logged_dropped)
        self._limit_store = self._open_limit_store()
        self._trimmer = Trimmer()
        self.byte_budget = budget = ByteBudget(config.max_pending_bytes, freed=self._trimmer.soon)
        self._control_server = GrpcServer(
            config.control_host,
            config.control_port,
            flag="--control-port",
            token=token,
            certificates=self._certificates,
            by_role=config.by_role,
            max_request_bytes=_MAX_CONTROL_BYTES,
        )
        timelines = Timelines()
        usage_log = UsageLog(usage_lines) if usage_lines is not None else None
        request_log = RequestLog(request_lines, config.request_log_text_chars) if request_lines is not None else None
        intake = Intake(
            clock=clock,
            tracer=tracer,
            metrics=self._metrics.requests,
            timelines=timelines,
            gate=gate,
            log_prompts=config.log_prompts,
            usage_sinks=[sink.ended for sink in (self._metrics.usage, usage_log) if sink is not None],
            request_log=request_log,
        )
        self._inference = servicer.InferenceServicer(intake, self.catalogue, gate)
        self._server = GrpcServer(
            config.host,
            config.port,
            certificates=self._public_certificates,
            reflects=True,
            max_request_bytes=config.max_message_bytes,
            guards=[KeyInterceptor(gate)],
            interceptors=[ReadInterceptor(budget, config.max_text_bytes, self._inference.counting)],
            max_concurrent_rpcs=config.max_concurrent_rpcs,
            freed=self._trimmer.soon,
        )
        limits = BodyLimits(config.max_message_bytes, config.max_text_bytes)
        objectives = Objectives(
            config.slo_ttft_ms, config.slo_tpot_ms, config.slo_itl_ms, config.slo_e2e_ms, config.slo_queue_ms
        )
        self._console = make_console(
            config,
            self.catalogue,
            timelines,
            self._metrics.requests,
            objectives,
            clock,
            lambda: {
                "grpc": self.address,
                "http": join(config.host, self.http_port),
                "control": self.control_address,
            },
        )
        routes = self._console.routes() if self._console is not None else []
        app: ASGIApp = make_app(
            intake,
            self.catalogue,
            gate,
            self._metrics.registry,
            budget,
            limits,
            routes,
            config.http_keepalive_s,
            clock=clock,
        )
        self._http = self._new_http_server(app)
        self._control = control.ControlServicer(
            self.catalogue,
            incarnation=self._incarnation,
            clock=clock,
            timelines=timelines,
            objectives=objectives,
        )
        self._registry = registry.RegistryServicer(
            self.catalogue, incarnation=self._incarnation, interval_s=config.register_s
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _new_http_server(self, app: ASGIApp) -> HttpServer | None:
        config = self._config
        if config.http_port < 0:
            return None
        return HttpServer(
            app,
            config.host,
            config.http_port,
            certificates=self._public_certificates,
            around=lambda app: guarded(
                app, config.host, hosts=config.http_allowed_host, origins=config.http_cors_origin
            ),
        )

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
        for lines in self._lines:
            lines.start()
        self._server.add(servicer.FULL_NAME, inference_pb2_grpc.add_InferenceServiceServicer_to_server, self._inference)
        add = self._control_server.add
        add(control.FULL_NAME, control_pb2_grpc.add_ControlServiceServicer_to_server, self._control)
        add(registry.FULL_NAME, control_pb2_grpc.add_RegistryServiceServicer_to_server, self._registry)
        self._control_server.promise(servicer.FULL_NAME)  # its health is told there too, by the cluster's certificate
        await self._server.start()
        await self._control_server.start()
        self._control.port = self.port
        if self._http is not None:
            await self._http.start()
            self._control.http_port = self._http.port
            self._control.has_http_tls = self._public_certificates is not None
        await self._control_server.set_ready(True, control.FULL_NAME, registry.FULL_NAME)
        self._tasks = [
            asyncio.create_task(self.catalogue.tick_forever(), name="tick"),
            asyncio.create_task(self._keep_health(), name="health"),
        ]
        for held in (self._certificates, self._public_certificates):
            if held is not None:
                self._tasks.append(asyncio.create_task(held.watch(), name="certificates"))
        if not self.gate.is_open:
            self._tasks.append(asyncio.create_task(self.gate.watch(), name="tenants"))
            self._tasks.append(asyncio.create_task(self._divide_limits(), name="shares of limits"))
            if self._limit_store is not None:
                store = self._limit_store.run(self.gate.quotas)
                self._tasks.append(asyncio.create_task(store, name="limits in a store"))
        if self._console is not None:
            self._tasks.append(asyncio.create_task(self._console.feed.remember(), name="console memory"))
        if self._config.log_interval_s:
            activity = activity_log(self.catalogue, self._metrics.requests, self._clock, self._config.log_interval_s)
            self._tasks.append(asyncio.create_task(activity.run(), name="activity log"))
        log.info("listening on %s, for workers and operators on %s", self.address, self.control_address)
        if not is_loopback(bare_host(self._config.host)):
            self._warn_of_strangers()

    def _warn_of_strangers(self) -> None:
        """Says what a router that listens beyond loopback leaves open."""
        public = self._public_certificates
        if self.gate.is_open and (public is None or not public.demands_peers):
            log.warning(_ANYONE, self.address, "" if public is not None else _AND_IN_THE_CLEAR)
        elif public is None:
            log.warning(_IN_THE_CLEAR, self.address)

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
        if self._console is not None:
            await self._console.close()  # who looks would keep the server from stopping
        if self._http is not None:
            await self._http.stop()
        await asyncio.gather(self._server.stop(grace_s=1.0), self._control_server.stop(grace_s=1.0))
        for model in self.catalogue.all():  # last: a text that came to a closed line would wait for ever
            model.line.close()
        self._trimmer.close()
        for lines in self._lines:  # after the servers, whose last requests end with them
            await asyncio.to_thread(lines.close)
        self._metrics.close()

    @property
    def conductor(self) -> Conductor:
        """Returns the conductor of the router's own model."""
        return self.catalogue.own.conductor

    @property
    def coordinator(self) -> Coordinator:
        """Returns the coordinator of the router's own model."""
        return self.conductor.coordinator

    def _open_lines(self, name: str, dropped: Counter | None) -> JsonLines | None:
        """Opens the file of the flags that begin with that name. Returns None if there is to be none."""
        config = self._config
        if dropped is None:
            return None
        lines = JsonLines(
            f"--{name.replace('_', '-')}",
            getattr(config, name),
            self._incarnation,
            most_bytes=getattr(config, f"{name}_bytes"),
            most_files=getattr(config, f"{name}_files"),
            dropped=dropped.inc,
        )
        self._lines.append(lines)
        return lines

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
            run_delay=RunDelay().since_last,
        )
        forms = forms_of(text.template_text, self._tool_parsers.of(model_id), self._reasoning_parsers.of(model_id))
        log.info(
            "model %s: calls of tools are read as %s, reasoning as %s", model_id, forms.tools_name, forms.reasoning
        )
        facts = ModelFacts(model_id, text.vocab_size, self._config.max_text_bytes, forms)
        line = TokeniserLine(num_threads, most_bytes=self._config.max_text_bytes)
        return ServedModel(facts, text, conductor, metrics.requests, line, str(policy))

    async def _text_of(self, worker: WorkerInfo) -> ModelText:
        assert worker.description is not None, "whoever registers has described itself"
        channel = self._dial(worker.description.address)
        try:
            return await model_text_of(channel, within_s=_FETCH_TEXT_S)
        finally:
            await channel.close()

    def _open_limit_store(self) -> LimitStore | None:
        store_up = self._metrics.limit_store_up
        if store_up is None:
            return None
        name = f"{self._incarnation:016x}"
        return LimitStore(self._config.tenants_store, name, self._clock, is_up=lambda up: store_up.set(float(up)))

    async def _divide_limits(self) -> None:
        """Divides the limits of tenants by the routers that share the workers."""
        while True:
            seen = max(model.conductor.num_routers for model in self.catalogue.all())
            self.gate.divide(self._config.routers or seen)
            await asyncio.sleep(_SHARES_EVERY_S)

    async def _keep_health(self) -> None:
        """Keeps InferenceService SERVING while a request would find a worker, and NOT_SERVING otherwise."""
        healthy = False
        while True:
            if self.catalogue.ready != healthy:
                healthy = self.catalogue.ready
                for server in (self._server, self._control_server):
                    await server.set_ready(healthy, servicer.FULL_NAME)
            await asyncio.sleep(TICK_S)


def _own_text(folder: str) -> ModelText:
    try:
        return load_model_text(folder)
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from error


def _coordinator_config(config: RouterConfig, text: ModelText, policy: PolicyConfig) -> CoordinatorConfig:
    router = CoordinatorConfig(
        model_context_tokens=text.context_tokens,
        vocab_size=text.vocab_size,
        max_workers=config.max_workers,
        max_queue=config.max_queue,
        queue_timeout_s=config.queue_timeout_s,
        no_worker_timeout_s=config.no_worker_timeout_s,
        aging_s=config.aging_s,
        step_timeout_s=config.step_timeout_s,
        canary_salt=f"canary-{new_request_id()}",
        health=HealthConfig(canaries=config.canaries, recheck_s=config.canary_period_s, starts_slowly=True),
    )
    return config.applied_to(router, policy)


def tokenizer_threads(config: RouterConfig) -> int:
    """Returns the number of threads for long texts: by default half of the cores, since the event loop needs one of
    them and workers may be on the same machine.
    """
    return config.tokenizer_threads or max(1, len(os.sched_getaffinity(0)) // 2)
