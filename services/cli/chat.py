"""Runs `baton chat`: a conversation in the terminal.

Ctrl-C ends the answer that is being written, never the program; end of input (Ctrl-D) or /exit ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

from baton.v1 import inference_pb2
from baton_client import CallFailed, Client
from services.cli.arguments import Parser, add_target
from services.cli.client import explain, inference, shown
from services.cli.generate import add_sampling, apply_sampling
from services.core.printable import printable

_PROMPT = "> "
# Low enough to stay on the subject; at 1 a small model rambles.
_TEMPERATURE = 0.7


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Talks to the model. /exit or Ctrl-D leaves, Ctrl-C cancels an answer.")
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, temperature=_TEMPERATURE)
    arguments = parser.parse_args(argv)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing, where Python was built with it
    # Set explicitly, since a shell that starts a program in the background makes it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with inference(arguments.target) as client:
        client.list_models(timeout_s=arguments.timeout)  # a wrong target is told before anything was typed
        _Conversation(client, arguments).run()
    return 0


class _Conversation:
    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self._messages: list[inference_pb2.ChatMessage] = []
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
        request = inference_pb2.GenerateRequest()
        request.messages.messages.extend(self._messages)
        apply_sampling(self._arguments, request)
        text = ""
        try:
            with self._client.generate_stream(request, timeout_s=self._arguments.timeout) as events:
                for event in events:
                    text += event.chunk.text
                    print(shown(event.chunk.text), end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" (cancelled)")
        return text

    def _add(self, role: str, content: str) -> None:
        self._messages.append(inference_pb2.ChatMessage(role=role, content=content))
