"""Runs `baton chat`: a conversation in the terminal.

Ctrl-C ends the answer that is being written, never the program; end of input (Ctrl-D) or /exit ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from baton.v1 import inference_pb2
from baton_client import CallFailed, Client
from services.cli.arguments import Parser, add_target
from services.cli.client import AnswerPrinter, explain, inference, tls_of
from services.cli.generate import add_sampling, apply_sampling
from services.cli.tables import clip, size
from services.core.ids import random_hex
from services.core.printable import printable
from services.rpc.plain import plain

_PROMPT = "> "
# Low enough to stay on the subject; at 1 a small model rambles.
_TEMPERATURE = 0.7


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Talks to the model. /exit or Ctrl-D leaves, Ctrl-C cancels an answer.")
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    figures = parser.add_mutually_exclusive_group()
    figures.add_argument("--quiet", action="store_true", help="no line about how fast an answer was, and by whom")
    figures.add_argument(
        "--stats", action="store_true", help="this line on standard error, also where standard output is no terminal"
    )
    add_sampling(parser, temperature=_TEMPERATURE)
    arguments = parser.parse_args(argv)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing, where Python was built with it
    # Set explicitly, since a shell that starts a program in the background makes it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with inference(arguments.target, tls_of(arguments)) as client:
        client.list_models(timeout_s=arguments.timeout)  # a wrong target is told before anything was typed
        _Conversation(client, arguments).run()
    return 0


class _Conversation:
    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self._messages: list[inference_pb2.ChatMessage] = []
        self._session = f"chat-{random_hex(16)}"  # so that routers that look at it keep it where its cache is
        if arguments.system is not None:
            self._add("system", arguments.system)

    def run(self) -> None:
        while True:
            try:
                line = input(_PROMPT).strip()
                if line == "/exit":
                    return
                if line:
                    self._turn(line)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")

    def _turn(self, line: str) -> None:
        """Asks one question and prints the answer.

        What was answered stays in the conversation, even if it was cancelled.
        """
        self._add("user", line)
        answer = ""
        try:
            answer = self._answer()
        except CallFailed as error:
            print(f"error: {printable(str(explain(error, self._arguments.target)))}", file=sys.stderr)
        if answer:
            self._add("assistant", answer)
        else:
            self._messages.pop()  # as if the question had not been asked

    def _answer(self) -> str:
        request = inference_pb2.GenerateRequest(session=self._session)
        request.messages.messages.extend(self._messages)
        apply_sampling(self._arguments, request)
        text, completion, printer = "", None, AnswerPrinter()
        try:
            with self._client.generate_stream(request, timeout_s=self._arguments.timeout) as events:
                for event in events:
                    text += event.chunk.text
                    printer.chunk(event.chunk)
                    if event.HasField("completion"):
                        completion = event.completion
            print()
            if completion is not None and self._tells_figures:
                print(dimmed(printable(figures(completion))), file=sys.stderr)
        except KeyboardInterrupt:
            print(" (cancelled)")
        return text

    @property
    def _tells_figures(self) -> bool:
        return bool(self._arguments.stats or (sys.stdout.isatty() and not self._arguments.quiet))

    def _add(self, role: str, content: str) -> None:
        self._messages.append(inference_pb2.ChatMessage(role=role, content=content))


def figures(completion: inference_pb2.Completion) -> str:
    """Returns in one line how fast an answer was and which workers made it, as far as its timings say.

    The speed is that of the tokens after the first, whose time is told by itself.
    """
    answer = plain(completion)
    timings, workers, num_tokens = answer["timings"], answer["workers"], answer["usage"]["output_tokens"]
    parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
    decode_ms = timings.get("total_ms", 0.0) - timings.get("ttft_ms", 0.0)
    if num_tokens > 1 and "ttft_ms" in timings and decode_ms > 0:
        parts.append(f"{(num_tokens - 1) / decode_ms * 1e3:.1f} tokens/s")
    if "ttft_ms" in timings:
        parts.append(f"first token {timings['ttft_ms']:.0f} ms")
    prefill, decode = clip(workers["prefill"]), clip(workers["decode"])
    if prefill and decode and prefill != decode:
        moved = size(timings["transfer_bytes"]) if "transfer_bytes" in timings else "KV"
        by = f" by {timings['transport']}" if "transport" in timings else ""
        exposed = f", {timings['transfer_exposed_ms']:.1f} ms exposed" if "transfer_exposed_ms" in timings else ""
        parts.append(f"{prefill} -> {decode}: {moved}{by}{exposed}")
    elif decode or prefill:
        parts.append(f"{decode or prefill}, not split")
    if workers["retries"]:
        parts.append(f"placed again {workers['retries']} time{'s' if workers['retries'] > 1 else ''}")
    return " | ".join(parts)


def dimmed(line: str) -> str:
    """Returns the line as a terminal shows it dim; as it is where standard error is none."""
    return f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else line
