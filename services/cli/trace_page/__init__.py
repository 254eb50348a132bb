"""Writes the requests of a trace file as one HTML page that needs nothing else: no server, no other file, no network.

The page has the console's own waterfall (`services/router/console/static`), its data, and one inlined script and style,
which its content security policy names by their digests: nothing else runs, whatever a trace file holds. Owns: the
page, and joining the console's modules to one script. Never: reading traces, or what is drawn.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from typing import Any

from services.cli.trace_bars import bars_of, readable
from services.cli.trace_breakdown import break_down
from services.cli.trace_reader import RecordedRequest
from services.core.jaeger import trace_link
from services.core.printable import printable
from services.rpc.names import Attr

MOST_REQUESTS = 500
"""Requests on a page: the newest. A request takes some 10 kB."""

_IMPORT = re.compile(r'^import \{([^}]*)\} from "[^"]*?([\w.-]+)";$', re.M)
_EXPORT = re.compile(r"^export (function|const|class) (\w+)", re.M)
_EXPORT_LIST = re.compile(r"\bexport\s*\{([^}]*)\};?\s*$")
_LEFT_OVER = re.compile(r"^\s*(import|export)\b", re.M)
_ENDS_SCRIPT = re.compile(r"</script|<!--|]]>", re.I)


def page(requests: Sequence[RecordedRequest], name: str, jaeger_url: str = "") -> str:
    """Returns the page of the newest requests, the first to be shown last in `requests`. `name` is the file's."""
    console = importlib.resources.files("services.router") / "console" / "static"
    own = importlib.resources.files("services.cli") / "trace_page"
    script = joined(
        [
            _module(console / "vendor", "htm-preact.js"),
            _module(console, "waterfall.js"),
            _module(own, "page.js"),
        ]
    )
    style = (console / "waterfall.css").read_text("utf-8") + (own / "page.css").read_text("utf-8")
    shown = requests[-MOST_REQUESTS:]
    data = {
        "file": printable(name),
        "numLeftOut": len(requests) - len(shown),
        "requests": [_row(request, jaeger_url) for request in reversed(shown)],
    }
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    licences = "\n\n".join((console / "vendor" / f"LICENSE.{part}").read_text("utf-8") for part in ("preact", "htm"))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(printable(name))}: requests of Baton</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            '<main id="page"><noscript>This page draws with JavaScript, which it brings itself.</noscript></main>',
            "<details><summary>Licences of what this page brings: preact and htm</summary>",
            f"<pre>{html.escape(licences)}</pre></details>",
            f'<script type="application/json" id="data">{_json(readable(data))}</script>',
            f'<script type="module">{script}</script>',
            "</body>",
            "</html>",
            "",
        ]
    )


def _row(request: RecordedRequest, jaeger_url: str) -> dict[str, Any]:
    root, told = request.root, break_down(request)
    about = root.attributes if root else {}
    second, moved = told.second_token, told.transfer
    bars = [bar.row() for bar in bars_of(request)]
    return {
        "id": request.request_id,
        "traceId": request.trace_id,
        "model": str(about.get(Attr.REQUEST_MODEL, "")),
        "startMs": request.start_ns / 1e6,
        "totalMs": (request.end_ns - request.start_ns) / 1e6,
        "ttftMs": told.first_token.total_ms,
        "exposedMs": second.transfer_exposed_ms if second else None,
        "overlappedMs": second.transfer_overlapped_ms if second else None,
        "movedBytes": moved.bytes if moved else None,
        "transport": moved.transport if moved else None,
        "promptTokens": about.get(Attr.INPUT_TOKENS),
        "cachedTokens": about.get(Attr.CACHE_READ_INPUT_TOKENS),
        "outputTokens": about.get(Attr.OUTPUT_TOKENS),
        "prefill": str(about.get(Attr.PREFILL_WORKER, "")),
        "decode": str(about.get(Attr.DECODE_WORKER, "")),
        "retries": about.get(Attr.RETRIES, 0),
        "outcome": bars[0]["outcome"] if root is not None else "unfinished",
        "failure": root.message if root is not None and root.failed else "",
        "jaeger": trace_link(jaeger_url, request.trace_id) if jaeger_url else "",
        "bars": bars,
    }


def joined(modules: Sequence[tuple[str, str]]) -> str:
    """Returns one script that does what the last of these modules does. Each is (file name, source), and imports from
    earlier ones.

    Raises ValueError for a form of import or export that it does not know, and for what would end an inlined script.
    """
    parts: list[str] = []
    names: dict[str, str] = {}
    for index, (file, source) in enumerate(modules):
        exported: list[str] = []

        def imported(match: re.Match[str]) -> str:
            if match[2] not in names:
                raise ValueError(f"{match[2]} is imported before it is there")
            bindings = ", ".join(": ".join(part.split(" as ")) for part in _listed(match[1]))
            return f"const {{ {bindings} }} = {names[match[2]]};"

        def named(match: re.Match[str], exported: list[str] = exported) -> str:
            exported.append(match[2])
            return f"{match[1]} {match[2]}"

        body = _EXPORT.sub(named, _IMPORT.sub(imported, source))
        if (found := _EXPORT_LIST.search(body)) is not None:
            pairs = [part.split(" as ") for part in _listed(found[1])]
            exported += [f"{pair[-1]}: {pair[0]}" for pair in pairs]
            body = body[: found.start()]
        if _LEFT_OVER.search(body) or _ENDS_SCRIPT.search(body):
            raise ValueError(f"{file} cannot be inlined")
        names[file] = f"module{index}"
        parts.append(f"const module{index} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();")
    return "\n".join(parts) + "\n"


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _module(folder: Traversable, file: str) -> tuple[str, str]:
    return file, (folder / file).read_text("utf-8")


def _json(data: Any) -> str:
    """Returns JSON that ends no script and opens no comment, whatever its strings hold."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    """Returns the source expression by which a policy allows this script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
