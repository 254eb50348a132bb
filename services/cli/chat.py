"""`baton chat`: a conversation in the terminal.

Ctrl-C ends the answer that is being written, never the program; end of input (Ctrl-D) or /exit does.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.cli.arguments import Parser, add_target
from services.cli.client import connect, explain
from services.cli.generate import add_sampling, apply_sampling

_PROMPT = "> "
# Enough to stay on the subject; a small model rambles at 1.
_TEMPERATURE = 0.7


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Talks to the model. /exit or Ctrl-D leaves, Ctrl-C cancels an answer.")
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, temperature=_TEMPERATURE)
    arguments = parser.parse_args(argv)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing, where Python was built with it
    # Also where a shell started it in the background, and it has inherited that SIGINT means nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with connect(arguments.target) as channel:
        _Conversation(channel, arguments).run()
    return 0


class _Conversation:
    def __init__(self, channel: grpc.Channel, arguments: argparse.Namespace) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
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
        """One question and its answer. What was answered stays in the conversation, cancelled or not."""
        self._add("user", line)
        answer = ""
        try:
            answer = self._answer()
        except grpc.RpcError as error:
            print(f"error: {explain(error, self._arguments.target)}", file=sys.stderr)
        if answer:
            self._add("assistant", answer)
        else:
            self._messages.pop()  # as if it had not been asked

    def _answer(self) -> str:
        request = inference_pb2.GenerateRequest()
        request.messages.messages.extend(self._messages)
        apply_sampling(self._arguments, request)
        text = ""
        call = self._stub.GenerateStream(request, timeout=self._arguments.timeout)
        try:
            for event in call:
                if event.HasField("chunk"):
                    text += event.chunk.text
                    print(event.chunk.text, end="", flush=True)
            print()
        except KeyboardInterrupt:
            call.cancel()
            print(" (cancelled)")
        return text

    def _add(self, role: str, content: str) -> None:
        self._messages.append(inference_pb2.ChatMessage(role=role, content=content))
