"""Draws `baton top` on a terminal, with textual: the cluster, and a request that was opened.

Owns: widgets, keys and colours, and when the router is asked. Never: what stands in a row, or what was heard. Text
reaches the terminal as `Text`, never as markup: names come from workers and clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from baton.v1 import control_pb2
from services.cli.top_cluster import (
    GLYPHS,
    PAIR_HEADINGS,
    WORKER_HEADINGS,
    PairRow,
    WorkerRow,
    heading,
    pair_rows,
    worker_rows,
)
from services.cli.top_feed import RouterFeed
from services.cli.top_requests import (
    REQUEST_HEADINGS,
    SORT_KEYS,
    FollowedRequest,
    RequestRow,
    SortKey,
    age,
    grades,
    having,
    in_order,
    longest_wait_s,
    request_row,
)
from services.cli.top_snapshot import request_lines
from services.cli.worker_words import CLASSES
from services.core.errors import BatonError
from services.core.printable import printable
from services.router.telemetry.slo import Grade
from services.rpc.plain import plain

INTERVAL_S = 1.0
_LEAST_PAUSE_S = 0.2
_MOST_ROWS = 100
"""The most that are drawn of a list. All that are known are sorted and filtered."""
_BESIDE_BAR = 110
"""Cells of a worker's row beside its bar."""
_LEAST_BAR, _MOST_BAR = 12, 40

_CLASS_STYLES = dict(zip(CLASSES, ("magenta", "yellow", "blue", "cyan", "bright_black"), strict=True))
_STATE_STYLES = {"ready": "green", "down": "bold red", "left": "bright_black"}
_PAIR_STYLES = {"proven": "green", "broken": "bold red"}
_GRADE_STYLES = {Grade.MET: "", Grade.NEAR: "yellow", Grade.MISSED: "red"}
_WARNING = "yellow"

Cells = Sequence[Text]


class RequestScreen(Screen[None]):
    """Shows one request: its waterfall, and why its workers were chosen. It follows the request while that lives."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace,enter", "dismiss", "back")]

    def __init__(self, request: FollowedRequest) -> None:
        super().__init__()
        self.request = request
        self.explained: dict[str, Any] | None = None

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="request", markup=False)
        yield Footer()

    def show(self, now: float) -> None:
        lines = request_lines(self.request, self.explained, now, max(60, self.size.width - 4))
        self.query_one("#request", Static).update(Text("\n".join(lines), no_wrap=False))


class TopApp(App[None]):
    """Shows what a router says, once a second. While it says nothing, what it has said stays, and is told to be old."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #heading, #trouble, #order { height: auto; padding: 0 1; }
    #trouble { background: $error; color: $text; display: none; }
    #workers { height: auto; max-height: 40%; }
    #pairs { height: auto; max-height: 25%; }
    #requests { height: 1fr; }
    #order { color: $text-muted; }
    #filter { display: none; }
    .old { opacity: 60%; }
    #request { padding: 0 1; width: auto; }
    RequestScreen VerticalScroll { overflow-x: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("slash", "filter", "filter"),
        Binding("escape", "unfilter", "show all", show=False),
        *(Binding(order.key, f"sort('{order.name}')", order.name) for order in SORT_KEYS),
    ]

    def __init__(self, feed: RouterFeed, hang_up: Callable[[], None] = lambda: None) -> None:
        """`feed` has heard from the router. `hang_up` ends a call that is under way, in another thread."""
        super().__init__()
        self._feed = feed
        self._hang_up = hang_up
        self._order: SortKey = SORT_KEYS[0]
        self._descending = self._order.descending
        self._part = ""
        """What the requests shown have in common; empty for all."""

    @property
    def _opened(self) -> RequestScreen | None:
        """Returns the request that is open, if one is."""
        return self.screen if self.is_running and isinstance(self.screen, RequestScreen) else None

    def compose(self) -> ComposeResult:
        yield Static(id="heading", markup=False)
        yield Static(id="trouble", markup=False)
        yield CellTable(WORKER_HEADINGS, id="workers")
        yield CellTable(PAIR_HEADINGS, id="pairs")
        yield Static(id="order", markup=False)
        yield Input(id="filter", placeholder="part of an id, model, phase, outcome or worker", compact=True)
        yield CellTable(REQUEST_HEADINGS, id="requests")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#requests").focus()
        self._show()
        self.run_worker(self._follow(), exclusive=True)

    def on_unmount(self) -> None:
        self._hang_up()

    async def _follow(self) -> None:
        while True:
            begun_s = self._feed.now
            with contextlib.suppress(BatonError):  # it is kept, and shown
                await asyncio.to_thread(self._feed.refresh)
            if self._opened is not None:
                await self._explain(self._opened)
            self._show()
            await asyncio.sleep(max(_LEAST_PAUSE_S, INTERVAL_S - (self._feed.now - begun_s)))

    async def _explain(self, screen: RequestScreen) -> None:
        """Asks why the request was placed where it was. Nothing is remembered of some, and that is no trouble."""
        timeline = screen.request.timeline
        request = control_pb2.ExplainRequest(request_id=timeline["request_id"])
        with contextlib.suppress(BatonError):
            answer = plain(await asyncio.to_thread(self._feed.ask, "Explain", request))
            age_us = (self._feed.now - screen.request.arrived_s) * 1e6
            same = [each for each in answer["requests"] if each["model"] == timeline["model"]]
            # Clients may use an id again: it is the one that arrived when this one did.
            screen.explained = min(same, key=lambda each: abs(each["age_us"] - age_us), default=None)
            if screen is self._opened:
                screen.show(self._feed.now)

    def _show(self) -> None:
        status, requests, now = self._feed.status, self._feed.requests, self._feed.now
        if status is None or not self.is_running:  # an app that ends takes its widgets away first
            return
        if (screen := self._opened) is not None:
            newest = self._feed.request(screen.request.timeline["number"])
            if newest is not None and newest.message.request_id == screen.request.message.request_id:
                screen.request = newest  # another router may have one of that number
            screen.show(now)
        lines = heading(self._feed.target, status, longest_wait_s(requests, now))
        self.query_one("#heading", Static).update(Text("\n").join([*map(Text, lines), _legend()]))
        self._show_trouble(now)
        width = min(_MOST_BAR, max(_LEAST_BAR, self.size.width - _BESIDE_BAR))
        workers = worker_rows(status, width, self._feed.paces)
        self.query_one("#workers", CellTable).fill([(str(n), _worker_cells(row)) for n, row in enumerate(workers)])
        pairs = pair_rows(status, [request.timeline for request in requests])[:_MOST_ROWS]
        table = self.query_one("#pairs", CellTable)
        table.display = bool(pairs)
        table.fill([(str(n), _pair_cells(row)) for n, row in enumerate(pairs)])
        self._show_requests(requests, now)

    def _show_trouble(self, now: float) -> None:
        error = self._feed.error
        trouble = self.query_one("#trouble", Static)
        trouble.display = error is not None
        for table in self.query(CellTable):
            table.set_class(error is not None, "old")
        if error is not None:
            trouble.update(Text(printable(f"no answer for {age(now - self._feed.heard_s)}, asking again: {error}")))

    def _show_requests(self, requests: Sequence[FollowedRequest], now: float) -> None:
        chosen = having(requests, self._part) if self._part else requests
        ordered = in_order(chosen, self._order, descending=self._descending)[:_MOST_ROWS]
        num_live = sum(request.is_live for request in requests)
        arrow = "▼" if self._descending else "▲"
        words = f"{len(requests)} requests known, {num_live} live, by {self._order.name} {arrow}"
        if self._part:
            words += f"; {len(chosen)} with {printable(self._part)!r}"
        self.query_one("#order", Static).update(Text(words))
        objectives = self._feed.objectives
        rows = [(str(each.timeline["number"]), _request_cells(each, now, objectives)) for each in ordered]
        self.query_one("#requests", CellTable).fill(rows)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leaves out what is for the list where there is none."""
        return action not in ("sort", "filter", "unfilter") or self._opened is None

    def action_sort(self, name: str) -> None:
        order = next(each for each in SORT_KEYS if each.name == name)
        again = order is self._order
        self._order, self._descending = order, not self._descending if again else order.descending
        self._show()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_unfilter(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._back_to_list()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._part = event.value
        self._show()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self._back_to_list()

    def _back_to_list(self) -> None:
        self.query_one("#filter", Input).display = False
        self.query_one("#requests").focus()

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.data_table.id != "requests" or event.row_key.value is None:
            return
        request = self._feed.request(int(event.row_key.value))
        if request is None:
            return
        screen = RequestScreen(request)
        await self.push_screen(screen)
        screen.show(self._feed.now)
        self.run_worker(self._explain(screen), group="explain", exclusive=True)


class CellTable(DataTable[Text]):
    """Shows rows that have keys. What has not changed is not drawn again, and the cursor stays with its row."""

    def __init__(self, headings: Sequence[str], *, id: str) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=False)
        self._headings = headings
        self._shown: list[tuple[str, Cells]] = []

    def on_mount(self) -> None:
        for name in self._headings:
            self.add_column(Text(name), key=name)

    def fill(self, rows: Sequence[tuple[str, Cells]]) -> None:
        if [key for key, _ in rows] == [key for key, _ in self._shown]:
            for (key, cells), (_, old) in zip(rows, self._shown, strict=True):
                for name, cell, before in zip(self._headings, cells, old, strict=True):
                    if (cell.plain, cell.style, cell.spans) != (before.plain, before.style, before.spans):
                        self.update_cell(key, name, cell, update_width=True)
        else:
            self._fill_anew(rows)
        self._shown = list(rows)

    def _fill_anew(self, rows: Sequence[tuple[str, Cells]]) -> None:
        at = self.cursor_row
        # At the top, the cursor follows what comes first; elsewhere a person has put it on a row.
        chosen = self._shown[at][0] if 0 < at < len(self._shown) else None
        scroll_y = self.scroll_y
        self.clear()
        for key, cells in rows:
            self.add_row(*cells, key=key)
        place = next((number for number, (key, _) in enumerate(rows) if key == chosen), None)
        if place is not None:
            self.move_cursor(row=place, scroll=False)
            self.scroll_to(y=scroll_y + place - at, animate=False)


def _legend() -> Text:
    return Text("  ").join([Text(f"{GLYPHS[name]} {name}", style=_CLASS_STYLES[name]) for name in CLASSES])


def _worker_cells(row: WorkerRow) -> Cells:
    blocks = Text()
    for name, length in zip(CLASSES, row.bar, strict=False):
        blocks.append(GLYPHS[name] * length, style=_CLASS_STYLES[name])
    state = Text(row.state, style=_STATE_STYLES.get(row.state, _WARNING))
    figures = (row.in_use, row.running, row.waiting, row.prefill_ms, row.decode_ms, row.tokens_per_s, row.age)
    numbers = [Text(each, justify="right") for each in figures]
    return [Text(row.worker_id), Text(row.role), state, blocks, *numbers, Text(row.reason, style=_WARNING)]


def _pair_cells(row: PairRow) -> Cells:
    state = Text(row.state, style=_PAIR_STYLES.get(row.state, _WARNING))
    numbers = [Text(each, justify="right") for each in (row.num_handoffs, row.exposed_ms, row.megabytes_per_s)]
    reason = Text(row.reason, style=_WARNING)
    return [Text(row.prefill), Text(row.decode), state, Text(row.transport), *numbers, reason]


def _request_cells(request: FollowedRequest, now: float, objectives: dict[str, float]) -> Cells:
    row, found = request_row(request, now), grades(request.timeline, objectives)
    styles = {name: _GRADE_STYLES[each] for name, each in found.items()}
    if not request.is_live and request.timeline["failure"]:
        styles["phase"] = "red"
    elif request.is_live:
        styles["phase"] = "green"
    if request.timeline["num_retries"]:
        styles["retries"] = _WARNING
    left = ("request_id", "phase", "workers")
    return [
        Text(getattr(row, name), style=styles.get(name, ""), justify="left" if name in left else "right")
        for name in RequestRow._fields
    ]
