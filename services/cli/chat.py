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
from services.cli.arguments import Parser, add_target, near
from services.cli.client import AnswerPrinter, explain, inference, tls_of
from services.cli.generate import add_sampling, apply_sampling
from services.cli.tables import clip, size
from services.core.errors import ConfigError
from services.core.ids import random_hex
from services.core.printable import printable
from services.rpc.plain import plain

_PROMPT = "> "
_COMMANDS = {
    "/help": "list these",
    "/clear": "forget what was said",
    "/system TEXT": "begin again with this system message; without TEXT with none",
    "/set NAME VALUE": "such as temperature 0.2; without VALUE its default, without NAME show all",
    "/exit": "leave; Ctrl-D does too",
}
# Low enough to stay on the subject; at 1 a small model rambles.
_TEMPERATURE = 0.7


def main(argv: Sequence[str], prog: str) -> int:
    arguments = make_parser(prog).parse_args(argv)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing, where Python was built with it
    # Set explicitly, since a shell that starts a program in the background makes it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with inference(arguments.target, tls_of(arguments)) as client:
        models = client.list_models(timeout_s=arguments.timeout)  # a wrong target is told before anything was typed
        if sys.stdout.isatty():
            print(greeting(models, arguments.model))
        Conversation(client, arguments).run()
    return 0


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Talks to the model. /exit or Ctrl-D leaves, Ctrl-C cancels an answer.")
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    figures = parser.add_mutually_exclusive_group()
    figures.add_argument("--quiet", action="store_true", help="no line about how fast an answer was, and by whom")
    figures.add_argument(
        "--stats", action="store_true", help="this line on standard error, also where standard output is no terminal"
    )
    add_sampling(parser, temperature=_TEMPERATURE)
    return parser


def greeting(models: Sequence[inference_pb2.Model], asked: str | None) -> str:
    """Returns the first line: with which model one talks, and how to leave. The router's own model is the first."""
    name = asked or (models[0].id if models else "the router's model")
    return dimmed(f"{printable(clip(name))}  /help lists commands, /exit or Ctrl-D leaves, Ctrl-C ends an answer")


class Conversation:
    """Keeps what was said, and what the next question is asked with."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self.messages: list[inference_pb2.ChatMessage] = []
        self._session = f"chat-{random_hex(16)}"  # so that routers that look at it keep it where its cache is
        self._clear()

    def run(self) -> None:
        while True:
            try:
                line = input(_PROMPT).strip()
                if line == "/exit":
                    return
                if line.startswith("/"):
                    print(self.obey(line))
                elif line:
                    self._turn(line)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
            except UnicodeError:
                print("(that line is not UTF-8)")

    def obey(self, line: str) -> str:
        """Does what a line that begins with a slash says, and returns what there is to say of it."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                return "\n".join(f"{command:<18}{what}" for command, what in _COMMANDS.items())
            case "/clear":
                self._clear()
                return "what was said is forgotten"
            case "/system":
                self._arguments.system = rest or None
                self._clear()
                return f"{'there is a' if rest else 'no'} system message now, and what was said is forgotten"
            case "/set":
                return self._set(rest)
        names = [command.split()[0] for command in _COMMANDS]
        return printable(f"{clip(name)} is no command{near(name, names)}; /help lists them")

    def _set(self, setting: str) -> str:
        """Takes `NAME VALUE`, as the flag of that name does; without a value the default is back.

        Returns what is set now."""
        name, _, value = setting.partition(" ")
        field, defaults = name.replace("-", "_"), vars(_settings().parse_args([]))
        if field in defaults:
            flags = [f"--{field.replace('_', '-')}={value.strip()}"] if value.strip() else []
            try:
                setattr(self._arguments, field, getattr(_settings().parse_args(flags), field))
            except ConfigError as error:
                return printable(str(error))
        elif name:
            return printable(f"{clip(name)} cannot be set{near(field, defaults)}; there are {', '.join(defaults)}")
        now = {each: getattr(self._arguments, each) for each in defaults}
        return "\n".join(printable(f"{each:<20}{'-' if at in (None, []) else at}") for each, at in now.items())

    def _clear(self) -> None:
        self.messages = []
        if self._arguments.system is not None:
            self._add("system", self._arguments.system)

    def _turn(self, line: str) -> None:
        """Asks one question and prints the answer.

        What was answered stays in the conversation, even if it was cancelled or has failed.
        """
        self._add("user", line)
        if answer := self._answer():
            self._add("assistant", answer)
        else:
            self.messages.pop()  # as if the question had not been asked

    def _answer(self) -> str:
        request = inference_pb2.GenerateRequest(session=self._session)
        request.messages.messages.extend(self.messages)
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
        except CallFailed as error:
            told = explain(error, self._arguments.target, has_tls=bool(self._arguments.tls_ca))
            print(end="\n" if text else "", flush=True)
            print(f"error: {printable(str(told))}", file=sys.stderr)
        return text

    @property
    def _tells_figures(self) -> bool:
        return bool(self._arguments.stats or (sys.stdout.isatty() and not self._arguments.quiet))

    def _add(self, role: str, content: str) -> None:
        self.messages.append(inference_pb2.ChatMessage(role=role, content=content))


def _settings() -> Parser:
    """Returns a parser of what `/set` may change: the flags of sampling."""
    parser = Parser(prog="/set", add_help=False)
    add_sampling(parser, temperature=_TEMPERATURE)
    return parser


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
