"""Runs `baton status`: the cluster as its router sees it, in short or in full, once or again and again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from baton.v1 import control_pb2
from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control
from services.cli.client import control, tls_of
from services.cli.status_summary import WINDOW_S, http_base, last_minute, summary
from services.cli.tables import clip, table
from services.cli.top_feed import MOST_REQUESTS, RouterFeed
from services.cli.worker_words import CLASSES, role_of
from services.core.errors import BatonError
from services.core.printable import printable
from services.kv.layout import TORCH
from services.rpc.plain import plain

_MODEL_HEADINGS = ("model", "state", "context", "workers", "queued", "running")
_PAIRING = "to pair, workers need the same engine, weights, --dtype, --kv-dtype and --quantization"
_HEADINGS = ("worker", "role", "state", "pid", "address", "run", "wait", *CLASSES, "session", "age")
_EVERY_S = 1.0
_MOST_LINE_CHARS = 400
_MOST_NAMED = 16
"""The most names of a list."""


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Shows the workers, their load and their blocks.")
    add_control(parser, timeout_s=CONTROL_TIMEOUT_S)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything the router knows, as JSON")
    form.add_argument("--watch", action="store_true", help="show it again each second, until Ctrl-C")
    parser.add_argument(
        "--verbose", action="store_true", help="also the ledger of blocks, kernels, policies, and what splitting pays"
    )
    arguments = parser.parse_args(argv)
    with control(arguments.target, arguments.cluster_token_file, tls_of(arguments)) as call:
        if arguments.json:
            print(json.dumps(plain(call("GetStatus", control_pb2.GetStatusRequest(), arguments.timeout))))
            return 0
        feed = RouterFeed(call, arguments.target, arguments.timeout)
        feed.refresh()
        if arguments.watch:
            _watch(feed, verbose=arguments.verbose)
        print(_shown(feed, verbose=arguments.verbose))
    return 0


def _shown(feed: RouterFeed, *, verbose: bool) -> str:
    assert feed.status is not None, "it has been heard"
    status, now = feed.status, feed.now
    figures = last_minute(feed.requests, now, status["up_ms"] / 1e3 or WINDOW_S, MOST_REQUESTS)
    lines = [*summary(feed.target, status, figures, time.time()), *map(printable, _groups(status))]
    if feed.error is not None:
        lines.append(f"no answer for {now - feed.heard_s:.0f} s: {clip(printable(str(feed.error)), _MOST_LINE_CHARS)}")
    return "\n".join([*lines, *(["", text(feed.target, status)] if verbose else [])])


def _watch(feed: RouterFeed, *, verbose: bool) -> NoReturn:
    """Draws in place on a terminal, else prints one below the other. A router that falls silent is asked again."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        while True:
            picture = Text(_shown(feed, verbose=verbose))
            if live is not None:
                live.update(picture, refresh=True)
            else:
                print(picture.plain, end="\n\n", flush=True)
            time.sleep(_EVERY_S)
            with contextlib.suppress(BatonError):  # the feed keeps it
                feed.refresh()


def text(target: str, status: dict[str, Any]) -> str:
    """Returns all of the status as text for people. `status` is a GetStatusResponse as plain data."""
    ready = "ready" if status["ready"] else "not ready"
    lines = [
        f"router {target}{http_base(target, status)}  pid {status['router_pid']}  {_models(status)}  {ready}",
        "requests  "
        + "  ".join(f"{name} {status['num_' + name]}" for name in ("queued", "prefilling", "parked", "decoding")),
        "",
    ]
    rows = [_HEADINGS, *(_row(worker) for worker in status["workers"])]
    if len(status["models"]) > 1:
        lines += [*table([_MODEL_HEADINGS, *map(_model_row, status["models"])]), ""]
        names = ["model", *(_model_of(worker) for worker in status["workers"])]
        rows = [(row[0], name, *row[1:]) for row, name in zip(rows, names, strict=True)]
    lines += table(rows)
    reasons = [f"{_id(worker)}: {worker['reason']}" for worker in status["workers"] if worker["reason"]]
    ways = [
        f"{clip(pair['prefill'])} -> {clip(pair['decode'])}: {pair['state']}; {pair['reason']}"
        for pair in status["pairs"]
        if pair["reason"]
    ]
    ways += [
        f"{clip(pair['prefill'])} -> {clip(pair['decode'])}: {pair.get('transport', '-')}, "
        f"{int(pair['bytes_per_s']) / 1e9:.2f} GB/s"
        for pair in status["pairs"]
        if pair.get("bytes_per_s") and not pair["reason"]
    ]
    rest = [
        clip(line, _MOST_LINE_CHARS)
        for line in (
            *_kernels(status),
            *_withheld(status),
            *_capacities(status),
            *_policies(status),
            *_splitting(status),
            *_prefixes(status),
            *reasons,
            *ways,
            *_groups(status),
        )
    ]
    return "\n".join(map(printable, [*lines, *rest]))


def _models(status: dict[str, Any]) -> str:
    names = [model["model_id"] for model in status["models"]]
    return f"model{'s' if len(names) > 1 else ''} {_listed(names) or '-'}"


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    running = model["num_live"] - model["num_queued"]
    counts = (model["context_tokens"], model["num_workers"], model["num_queued"], running)
    return (clip(model["model_id"]), "ready" if model["ready"] else "not ready", *map(str, counts))


def _kernels(status: dict[str, Any]) -> list[str]:
    """Returns a line for all workers that compute in the same way."""
    names: dict[str, list[str]] = {}
    for worker in (worker for worker in status["workers"] if worker.get("worker", {}).get("kernels")):
        description = worker["worker"]
        numerics, kv_dtype = description["fingerprint"]["numerics"], description.get("layout", {}).get("dtype")
        engine = clip(description.get("layout", {}).get("engine") or TORCH)
        words = f"{engine}; {numerics}; {f'{clip(kv_dtype)} KV; ' if kv_dtype else ''}{description['kernels']}"
        names.setdefault(words, []).append(_id(worker))
    return [f"{_listed(ids)}: {words}" for words, ids in names.items()]


def _withheld(status: dict[str, Any]) -> list[str]:
    """Returns a line for what workers do not move KV by, though it would help, and why."""
    names: dict[str, list[str]] = {}
    for worker in status["workers"]:
        if why := worker.get("worker", {}).get("withheld"):
            names.setdefault(why, []).append(_id(worker))
    return [f"{_listed(ids)}: KV is not moved by {why}" for why, ids in names.items()]


def _capacities(status: dict[str, Any]) -> list[str]:
    """Returns a line for each capacity that workers have declared, other than the usual 1."""
    names: dict[float, list[str]] = {}
    for worker in status["workers"]:
        if (capacity := worker.get("worker", {}).get("capacity", 1.0)) != 1.0:
            names.setdefault(capacity, []).append(_id(worker))
    return [f"{_listed(ids)}: capacity {capacity:g}" for capacity, ids in sorted(names.items())]


def _groups(status: dict[str, Any]) -> list[str]:
    """Returns a line for each model whose ready workers compute differently and do not all pair."""
    lines, are_amiss = [], False
    for model in status["models"]:
        groups = [(group.get("engine") or TORCH, group["kv"], group["worker_ids"]) for group in model["kv_groups"]]
        if len(groups) > 1:
            of = f"{clip(model['model_id'])}: " if len(status["models"]) > 1 else ""
            named = " | ".join(f"{_listed(ids)} ({clip(engine)} {kv[:8]})" for engine, kv, ids in groups)
            differ = len({engine for engine, _, _ in groups}) < len(groups)
            lines.append(f"{of}{'cannot pair, by fingerprint' if differ else 'pair within their engine'}: {named}")
            are_amiss |= differ
    return [*lines, _PAIRING] if are_amiss else lines


def _policies(status: dict[str, Any]) -> list[str]:
    """Returns a line for each policy, with the models whose requests are placed by it."""
    names: dict[str, list[str]] = {}
    for model in status["models"]:
        if model.get("policy"):
            names.setdefault(model["policy"], []).append(model["model_id"])
    return [f"{_listed(models)}: placed by {policy}" for policy, models in names.items()]


def _splitting(status: dict[str, Any]) -> list[str]:
    """Returns a line for each model that says which prompts are split now."""
    lines = []
    for model in status["models"]:
        if (found := model.get("split_break_even")) is None:
            continue
        tokens = found.get("tokens")
        if tokens is None:
            words = "pays for no prompt now"
        else:
            words = f"pays from about {tokens} uncached tokens on" if tokens else "pays for every prompt"
        handoff = f"handoff {found['handoff_ms']:.1f} ms" if "handoff_ms" in found else "handoff not measured yet"
        of = f"{clip(model['model_id'])}: " if len(status["models"]) > 1 else ""
        lines.append(f"{of}split {words}: {clip(found['prefill'])} -> {clip(found['decode'])} ({handoff})")
    return lines


def _prefixes(status: dict[str, Any]) -> list[str]:
    """Returns a line for each model that says which prefixes are brought from other workers now."""
    lines = []
    for model in status["models"]:
        if (found := model.get("prefix_break_even")) is None:
            continue
        tokens = found.get("tokens")
        words = "never pays now" if tokens is None else f"pays from about {tokens} tokens on"
        learnt = f"of {found['num_seen']} brought" if found["num_seen"] else "assumed"
        of = f"{clip(model['model_id'])}: " if len(status["models"]) > 1 else ""
        lines.append(
            f"{of}bringing a prefix {words}: {clip(found['source'])} -> {clip(found['target'])} "
            f"({found['fixed_ms']:.1f} ms + {found['token_ms']:.3f} ms a token, {learnt})"
        )
    return lines


def _row(status: dict[str, Any]) -> tuple[str, ...]:
    worker, load = status.get("worker", {}), status.get("load")
    counts = ["-"] * (2 + len(CLASSES))
    age = "-"
    if load is not None:
        counts = [str(load[name]) for name in ("num_running", "num_waiting", *(f"blocks_{name}" for name in CLASSES))]
        age = f"{status['load_age_ms']} ms"
    identity = (_id(status), role_of(worker.get("roles", [])), status["state"], str(worker.get("pid", "-")))
    return (*identity, clip(worker.get("address", "-")), *counts, "yes" if status["has_session"] else "no", age)


def _model_of(status: dict[str, Any]) -> str:
    return clip(str(status.get("worker", {}).get("layout", {}).get("model_id", "-")))


def _id(status: dict[str, Any]) -> str:
    return clip(str(status.get("worker", {}).get("worker_id", "-")))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(clip, names[:_MOST_NAMED])) + more
