"""Shows a cluster's start on a terminal while it goes on, then where everything is, and later what is out of order.

Owns: what a person sees of `baton up`. What the processes write goes to a file (`run_log.py`), of which warnings and
errors are shown. Never: what happens in the cluster, or the form for scripts (`cluster_output.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import shlex
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from baton.v1 import control_pb2
from services.cli.arguments import DEFAULT_CONTROL_TARGET, DEFAULT_TARGET, command_line
from services.cli.child import Ready
from services.cli.client import API_KEY
from services.cli.cluster_status import ClusterStatus, read_status
from services.cli.readiness import local_address
from services.cli.run_log import RunLog
from services.core.printable import printable
from services.core.start_progress import StartProgress
from services.rpc.certificates import Certificates

_POLL_S = 0.2
_CANARIES_S = 5.0
"""Longest wait for canaries that are not needed for a first request, before the card is shown."""
_MOST_WARNINGS = 10
"""Warnings shown of those that come within one poll; the others are counted."""
_LAST_LINES, _LAST_CHARS = 6, 200
"""Lines of a process that has died which are shown, and how much of each."""
_NAME_WIDTH, _BAR_WIDTH, _NARROW = 20, 16, 64
"""Columns of a name at most, of a bar, and of a terminal that has no room for bars."""
_HANDOFFS = "handoffs"
_CANARIES = "canaries"
"""The stage in which the router tries a worker, or a pair, with requests of its own."""


@dataclasses.dataclass
class StartPart:
    """Keeps how far one part of the start has come: a process, or what is done before any starts."""

    name: str
    began_s: float
    stage: str = "start"
    stage_began_s: float = 0.0
    detail: str = ""
    share: float | None = None
    """Share of the stage that is done, from 0 to 1; None if that is not known."""
    stages: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    """Stages that are over, with their seconds."""
    outcome: str = ""
    """How it ended, "done" or "failed"; empty while it goes on."""
    took_s: float = 0.0

    def enter(self, stage: str, now: float, detail: str = "", share: float | None = None) -> None:
        if stage != self.stage:
            self.stages.append((self.stage, now - self.stage_began_s))
            self.stage, self.stage_began_s = stage, now
        self.detail, self.share = detail, share

    def end(self, outcome: str, now: float, summary: str = "") -> None:
        if not self.outcome:
            self.stages.append((self.stage, now - self.stage_began_s))
            self.outcome, self.detail, self.took_s = outcome, summary, now - self.began_s


class StartScreen:
    """Draws on a terminal. As a context it restores the terminal at the end, whatever happened."""

    def __init__(
        self,
        log: RunLog,
        token: str | None,
        *,
        host: str,
        model_id: str,
        drain_s: float,
        has_console: bool = True,
        needs_key: bool = False,
        console_token_file: str = "",
        cluster_token_file: str = "",
        certificates: Certificates | None = None,
        tls_dir: str = "",
        has_public_tls: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`token` is the cluster's and `certificates` an operator's, with which the router is asked for its state;
        `host` is what the router binds. With `has_public_tls` clients speak TLS to it, and within the cluster everybody
        does with a `tls_dir`.

        With `needs_key` clients need an API key, which the request to copy takes from the environment."""
        # The terminal knows its own width, also where COLUMNS was exported in another.
        about = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._console = console or Console(highlight=False, _environ=about)
        self._log, self._token, self._host, self._now = log, token, host, now
        self._model_id, self._drain_s = model_id, drain_s
        self._needs_key = needs_key
        self._has_console, self._console_token_file = has_console, console_token_file
        self._cluster_token_file = cluster_token_file
        self._certificates, self._tls_dir, self._has_public_tls = certificates, tls_dir, has_public_tls
        self._spinner = Spinner("line" if self._console.options.ascii_only else "dots", style="cyan")
        self._parts: dict[str, StartPart] = {}
        self._router: Ready | None = None
        self._live: Live | None = None
        self._is_carded = False
        self._proven = asyncio.Event()
        """Is set while no part of the start goes on."""
        self._draining = ""
        """What still runs, in words, while the cluster drains; empty before."""
        self._stopping_s = 0.0
        """Since when it drains."""

    def __enter__(self) -> StartScreen:
        handler = _ScreenHandler(self)
        handler.setFormatter(logging.Formatter("%(levelname)s baton up: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._show_news()
        self._end_live()
        if self._log.close() and isinstance(error, Exception):
            self._print(f"all that the processes wrote: {self._log.path}", "dim")

    @property
    def child_fd(self) -> int:
        return self._log.fd

    # -- what happens -------------------------------------------------------------------------------------------------

    def fact(self, line: str) -> None:
        """Shows nothing: of what is as it should be, the parts and the card tell."""

    def event(self, line: str) -> None:
        self._print(line, "bold yellow")

    def begun(self, name: str) -> None:
        now = self._now()
        self._log.begin(name)
        self._parts[name] = StartPart(name, now, stage_began_s=now)
        self._draw()

    def progressed(self, name: str, progress: StartProgress) -> None:
        share = progress.done / progress.total if progress.total > 0 else None
        self._parts[name].enter(progress.stage, self._now(), progress.detail, share)
        if self._live is not None:
            self._live.refresh()  # so that a short stage is seen too

    def done(self, name: str, summary: str, took_s: float | None = None) -> None:
        now = self._now()
        part = self._parts.setdefault(name, StartPart(name, now, stage_began_s=now))
        part.end("done", now, summary)
        if took_s is not None:
            part.took_s = took_s
        self._draw()

    def serving(self, name: str, ready: Ready) -> None:
        if name == "router":
            self._router = ready
            self._parts[name].end("done", self._now())
        else:
            self._parts[name].enter(_CANARIES, self._now(), "joins the router")
        if self._is_carded:
            self._print(f"{name} serves again  pid {ready.pid}", "green")

    def ended(self, name: str) -> None:
        self._parts[name].end("failed", self._now())
        self._show_news()
        lines = self._log.last_lines(name, _LAST_LINES)
        self._print(f"{name} has ended; its last lines:" if lines else f"{name} has ended without a word", "bold red")
        for line in lines:
            self._print(f"  {line if len(line) <= _LAST_CHARS else line[:_LAST_CHARS] + ' ...'}")

    async def ready(self) -> None:
        self._look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANARIES_S):
                await self._proven.wait()
        self._end_live()
        self._show_news()
        self._is_carded = True
        for line in self._card():
            # The terminal wraps them itself, so that they can be copied whole.
            self._console.print(line, soft_wrap=True)

    def stopping(self, reason: str) -> None:
        self._end_live()
        patience = f"requests that run get {self._drain_s:g} s" if self._router is not None else "nothing runs yet"
        self._console.file.write("\r")  # over the ^C that the terminal has echoed
        self._print(f"stopping ({reason}): {patience}; Ctrl-C once more stops at once", "bold")
        self._draining, self._stopping_s = "draining", self._now()
        self._draw()

    def stopped(self, line: str) -> None:
        self._end_live()
        self._print(line)

    async def follow(self) -> None:
        """Shows warnings, and while there is something to draw asks the router for its state."""
        while True:
            self._show_news()
            if self._live is not None and self._router is not None:
                address = local_address("127.0.0.1", self._router.control_port)
                self._take(await read_status(address, self._token, self._certificates))
            await asyncio.sleep(_POLL_S)

    # -- the router's view --------------------------------------------------------------------------------------------

    def _take(self, status: ClusterStatus | None) -> None:
        if self._draining:
            left = status.num_requests if status is not None else 0
            waited = f"{self._now() - self._stopping_s:.0f} s of at most {self._drain_s:g}"
            words = f"{left} request{'s run' if left != 1 else ' runs'} still: {waited}"
            self._draining = words if left else "ending the processes"
            return
        if status is None:
            return
        now = self._now()
        for name, part in self._parts.items():
            state, reason = status.workers.get(name, (None, ""))
            if part.outcome or part.stage != _CANARIES or state is None:
                continue
            if state == control_pb2.WORKER_STATE_READY:
                part.end("done", now)
            else:
                part.enter(_CANARIES, now, reason)
        self._take_pairs(status, now)
        self._look()

    def _take_pairs(self, status: ClusterStatus, now: float) -> None:
        if not status.num_pairs:
            return
        part = self._parts.setdefault(_HANDOFFS, StartPart(_HANDOFFS, now, _CANARIES, now))
        words = f"{status.num_proven} of {status.num_pairs} pairs proven"
        part.enter(_CANARIES, now, words, status.num_proven / status.num_pairs)
        # Until all workers have come, more pairs may.
        others = (each.outcome for name, each in self._parts.items() if name != _HANDOFFS)
        if status.num_proven == status.num_pairs and all(others):
            part.end("done", now, words)

    def _look(self) -> None:
        """Notes whether all parts are done."""
        if all(part.outcome for part in self._parts.values()):
            self._proven.set()
        else:
            self._proven.clear()

    # -- what is drawn ------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._live is None and (self._draining or not self._is_carded):
            # What others print to stderr stands above the drawing; nothing of Baton's does.
            self._live = Live(
                console=self._console,
                get_renderable=self._picture,
                refresh_per_second=8,
                transient=bool(self._draining),
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def _end_live(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _picture(self) -> RenderableType:
        if self._draining:
            self._spinner.update(text=self._draining)
            return self._spinner
        return self._parts_table(self._now())

    def _parts_table(self, now: float) -> Table:
        is_wide = self._console.width >= _NARROW
        most = _NAME_WIDTH if is_wide else _NAME_WIDTH // 2
        table = Table.grid(padding=(0, 1), expand=True)
        # A terminal echoes ^C behind the last row: were that as wide as the terminal, it would wrap, and all be moved.
        table.width = max(1, self._console.width - len("^C"))
        names = [*map(printable, list(self._parts)), _HANDOFFS]
        table.add_column(no_wrap=True, overflow="ellipsis", style="bold", width=min(most, max(map(len, names))))
        table.add_column(no_wrap=True, width=2)
        table.add_column(no_wrap=True, justify="right", width=7)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for part in list(self._parts.values()):
            took_s = part.took_s if part.outcome else now - part.began_s
            words: RenderableType = Text(_words(part, now), no_wrap=True, overflow="ellipsis")
            if is_wide and not part.outcome:
                words = _with_bar(part.share, words)
            table.add_row(Text(printable(part.name)), self._mark(part), Text(f"{took_s:.1f} s"), words)
        return table

    def _mark(self, part: StartPart) -> RenderableType:
        plain = self._console.options.ascii_only
        match part.outcome:
            case "done":
                return Text("ok" if plain else "✓", "green")
            case "failed":
                return Text("!!" if plain else "✗", "red")
            case _:
                return self._spinner

    def _card(self) -> Sequence[Text]:
        assert self._router is not None, "the cluster is ready"
        ready, host = self._router, self._host
        rows = {}
        scheme = "https" if self._has_public_tls else "http"
        http = f"{scheme}://{local_address(host, ready.http_port)}" if ready.http_port else ""
        if http and self._has_console:
            asks = f"  (asks for the token in {self._console_token_file})" if self._console_token_file else ""
            rows["console"] = f"{http}/{asks}"
        if http:
            rows["HTTP"] = f"{http}/v1  (as OpenAI's clients speak it)"
        rows["gRPC"] = local_address(host, ready.port)
        control = local_address("127.0.0.1", ready.control_port)
        rows["control"] = f"{control}  (also for baton status, explain, drain)"
        rows["log"] = str(self._log.path)
        rows["try"] = _first_request(http, rows["gRPC"], needs_key=self._needs_key)
        rows["chat"] = command_line("chat", rows["gRPC"], DEFAULT_TARGET)
        rows["watch"] = command_line("top", control, DEFAULT_CONTROL_TARGET, self._cluster_token_file)
        if self._tls_dir:
            at = pathlib.Path(self._tls_dir).absolute()
            files = {"CA": "ca.pem", "CERT": "operator.pem", "KEY": "operator.key"}
            rows["TLS"] = "export " + " ".join(
                f"BATON_TLS_{name}={shlex.quote(str(at / file))}" for name, file in files.items()
            )
        lines = [Text(""), Text(f"Baton is ready: {printable(self._model_id)}", "bold green")]
        lines += [Text.assemble((f"  {name:<8} ", "bold"), printable(value)) for name, value in rows.items()]
        return [*lines, Text("  Ctrl-C drains and stops; warnings appear here.", "dim"), Text("")]

    def _show_news(self) -> None:
        # While the cluster stops, processes that end are missed by others, which warn of it.
        loud = [line for line in self._log.news() if line.is_loud and not (self._draining and line.level == "WARNING")]
        for line in loud[:_MOST_WARNINGS]:
            self._print(f"{line.level} {line.who} {line.text}", "red" if line.level != "WARNING" else "yellow")
        if len(loud) > _MOST_WARNINGS:
            self._print(f"and {len(loud) - _MOST_WARNINGS} more in {self._log.path}", "yellow")

    def _print(self, line: str, style: str = "") -> None:
        try:
            self._console.print(Text(printable(line), style), soft_wrap=True)
        except OSError:  # the terminal has gone: the cluster runs on without output
            self._console = Console(quiet=True)


class _ScreenHandler(logging.Handler):
    """Shows what the supervisor itself logs."""

    def __init__(self, screen: StartScreen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._screen.event(self.format(record))
        except Exception:
            self.handleError(record)


def _with_bar(share: float | None, words: RenderableType) -> Table:
    """Returns the words behind a bar; without a share it shows only that something goes on."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=_BAR_WIDTH)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_row(ProgressBar(1.0, share or 0.0, _BAR_WIDTH, pulse=share is None), words)
    return table


def _words(part: StartPart, now: float) -> str:
    """Returns what a part does, or what it took."""
    if part.outcome == "failed":
        return f"failed in {part.stage}"
    if part.outcome:
        stages = part.stages if len(part.stages) > 1 else []
        return printable(
            part.detail or ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages) + " s" * bool(stages)
        )
    detail = f": {part.detail}" if part.detail else ""
    return printable(f"{part.stage} {now - part.stage_began_s:.1f} s{detail}")


def _first_request(http: str, target: str, *, needs_key: bool) -> str:
    if not http:
        return f'{command_line("generate", target, DEFAULT_TARGET)} --prompt "Why is the sky blue?"'
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'
    key = f'-H "authorization: Bearer ${API_KEY}" ' if needs_key else ""
    return f"curl {http}/v1/chat/completions {key}-H 'content-type: application/json' -d '{body}'"
