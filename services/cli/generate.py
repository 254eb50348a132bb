"""Runs `baton generate`: one prompt and its answer, printed as it arrives, or several answers, or one JSON object."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from baton.v1 import inference_pb2
from baton_client import Client
from services.cli.arguments import Parser, add_target, token_ids
from services.cli.client import AnswerPrinter, inference, shown, tls_of
from services.core.errors import BatonError, ConfigError
from services.core.printable import printable, printable_json
from services.rpc.plain import plain

MAX_TOKENS = 256
"""The longest answer of a person who has not said how long it may be."""
_SHOWN_TIMINGS = (("ttft_ms", "first token"), ("transfer_exposed_ms", "exposed transfer"), ("total_ms", "total"))


def main(argv: Sequence[str], prog: str) -> int:
    arguments = make_parser(prog).parse_args(argv)
    request = request_of(arguments)
    with inference(arguments.target, tls_of(arguments)) as client:
        answer_of(client, request, arguments)
    return 0


def answer_of(client: Client, request: inference_pb2.GenerateRequest, arguments: argparse.Namespace) -> None:
    """Sends the request and prints its answer. A text is sent as a user's message where the model takes messages,
    unless the arguments say otherwise."""
    if request.HasField("text") and not arguments.raw:
        models = client.list_models(timeout_s=arguments.timeout)
        if takes_messages(models, request.model):
            _make_messages(request, None)
    with client.generate_stream(request, timeout_s=arguments.timeout) as events:
        answer = _read(events, echo=not arguments.json and arguments.n in (None, 1))
    if arguments.json:
        print(printable_json(answer))
    else:
        if "further" in answer:
            _print_all(answer)
        _summarise(answer)


def takes_messages(models: Sequence[inference_pb2.Model], name: str) -> bool:
    """Returns whether the model of that name has a chat template. Without a name it is the router's own, the first."""
    found = next((model for model in models if name in ("", model.id)), None)
    return found is not None and found.has_chat_template


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Sends one prompt and prints the answer.")
    add_target(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="F", help="read the prompt from a file; - is standard input")
    prompt.add_argument("--token-ids", type=token_ids, metavar="1,2,3", help="a prompt that is tokenised already")
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `request_of` and `answer_of` read, but for those of the prompt itself."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        help="send the prompt as a user's message in the chat template (default: if the model has one)",
    )
    form.add_argument("--raw", action="store_true", help="send the prompt as it is, for the model to go on with")
    parser.add_argument("--system", metavar="TEXT", help="system message, before the prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--request-id", metavar="ID", help="label, also of the trace (default: drawn by the router)")
    parser.add_argument("--session", metavar="ID", help="the conversation it belongs to: some policies place by it")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: the likeliest N tokens at each position"
    )
    parser.add_argument("--priority", type=int, metavar="N", help="higher is served first")
    parser.add_argument("--n", type=int, metavar="N", help="answers to make of the prompt (default: one)")
    constraint = parser.add_mutually_exclusive_group()
    constraint.add_argument("--json-schema", metavar="F", help="answer with JSON that is valid under this schema")
    constraint.add_argument("--regex", metavar="R", help="answer with what this expression matches as a whole")
    constraint.add_argument("--grammar", metavar="F", help="answer with a text of this grammar, GBNF or Lark")
    constraint.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these; repeatable")
    add_sampling(parser, max_tokens=MAX_TOKENS)


def add_sampling(
    parser: argparse.ArgumentParser, *, temperature: float | None = None, max_tokens: int | None = None
) -> None:
    """Adds the flags that `apply_sampling` reads. A flag that is not given leaves its value to the router."""
    parser.add_argument("--model", metavar="ID", help="which of the models that are served (default: the router's own)")
    default = f" (default: {max_tokens})" if max_tokens is not None else ""
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", default=max_tokens, help=f"most tokens to produce{default}"
    )
    parser.add_argument("--temperature", type=float, metavar="T", default=temperature, help="0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1 discourages repeating")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable")


def apply_sampling(arguments: argparse.Namespace, request: inference_pb2.GenerateRequest) -> None:
    """Copies these flags as far as they were given. Raises ConfigError for a number that the field cannot hold."""
    assign(request, "model", arguments.model, "--model")
    assign(request.stopping, "max_tokens", arguments.max_tokens, "--max-tokens")
    assign(request.sampling, "temperature", arguments.temperature, "--temperature")
    assign(request.sampling, "top_p", arguments.top_p, "--top-p")
    assign(request.sampling, "repetition_penalty", arguments.repetition_penalty, "--repetition-penalty")
    assign(request.sampling, "seed", arguments.seed, "--seed")
    request.stopping.stop.extend(arguments.stop)


def assign(message: Message, field: str, value: Any, flag: str) -> None:
    """Sets the field unless the value is None.

    Raises a ConfigError that names the flag if the field cannot hold the value.
    """
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag}: {error}") from error


def request_of(arguments: argparse.Namespace) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    if arguments.token_ids is not None:
        _set_token_ids(arguments, request)
    else:
        _set_text(arguments, request)
    assign(request, "request_id", arguments.request_id, "--request-id")
    assign(request, "session", arguments.session, "--session")
    assign(request, "priority", arguments.priority, "--priority")
    assign(request, "n", arguments.n, "--n")
    assign(request.response, "logprobs", arguments.logprobs, "--logprobs")
    apply_sampling(arguments, request)
    _set_constraint(arguments, request)
    return request


def _set_constraint(arguments: argparse.Namespace, request: inference_pb2.GenerateRequest) -> None:
    """Sets what the answer is constrained to, if anything. The router checks it."""
    if arguments.json_schema is not None:
        request.constraint.json_schema = _read_file(arguments.json_schema, "--json-schema")
    elif arguments.grammar is not None:
        request.constraint.grammar = _read_file(arguments.grammar, "--grammar")
    elif arguments.regex is not None:
        assign(request.constraint, "regex", arguments.regex, "--regex")
    elif arguments.choice:
        request.constraint.choices.texts.extend(arguments.choice)


def _set_token_ids(arguments: argparse.Namespace, request: inference_pb2.GenerateRequest) -> None:
    if arguments.chat or arguments.system is not None:
        flag = "--chat" if arguments.chat else "--system"
        raise ConfigError(f"{flag} needs text: give --prompt or --prompt-file")
    request.token_ids.SetInParent()  # an empty list is for the router to refuse
    try:
        request.token_ids.ids.extend(arguments.token_ids)
    except ValueError as error:
        raise ConfigError(f"--token-ids: {error}") from error


def _set_text(arguments: argparse.Namespace, request: inference_pb2.GenerateRequest) -> None:
    text, flag = arguments.prompt, "--prompt"
    if text is None:
        text, flag = _read_file(arguments.prompt_file, "--prompt-file"), "--prompt-file"
    assign(request, "text", text, flag)
    if arguments.system is not None and arguments.raw:
        raise ConfigError("--system: not allowed with --raw, which sends no messages")
    if arguments.chat or arguments.system is not None:
        _make_messages(request, arguments.system)


def _make_messages(request: inference_pb2.GenerateRequest, system: str | None) -> None:
    """Makes the request's text a user's message, behind a system message if there is one."""
    text = request.text
    request.messages.SetInParent()
    if system is not None:
        assign(request.messages.messages.add(role="system"), "content", system, "--system")
    request.messages.messages.add(role="user", content=text)


def _read_file(path: str, flag: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {error}") from error


def _read(events: Iterator[inference_pb2.GenerateStreamResponse], *, echo: bool) -> dict[str, Any]:
    """Returns the whole answer as data, the second and later ones below `further`. With `echo` the text is printed as
    it arrives."""
    request_id, outputs = "", defaultdict[int, _Output](_Output)
    printer = AnswerPrinter()
    try:
        for event in events:
            if event.HasField("prompt_info"):
                request_id = event.prompt_info.request_id
            elif event.HasField("chunk"):
                outputs[event.chunk.index].add(event.chunk)
                if echo:
                    printer.chunk(event.chunk)
            elif event.HasField("completion"):
                outputs[event.completion.index].completion = event.completion
    finally:
        if echo and outputs:  # so that whatever is said of it stands in a line of its own
            print(flush=True)
    first, *further = [outputs[index].as_data() for index in range(max(outputs, default=0) + 1)]
    answer = {"request_id": request_id, **first}
    return answer | ({"further": further} if further else {})


@dataclass
class _Output:
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    completion: inference_pb2.Completion | None = None

    def add(self, chunk: inference_pb2.Chunk) -> None:
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(plain(entry) for entry in chunk.logprobs)

    def as_data(self) -> dict[str, Any]:
        if self.completion is None:
            raise BatonError("the stream ended without a completion")
        ended = plain(self.completion)
        answer: dict[str, Any] = {"text": self.text, **({"reasoning": self.reasoning} if self.reasoning else {})}
        answer["token_ids"] = self.token_ids
        answer |= {name: ended[name] for name in ("finish_reason", "usage", "timings", "workers")}
        return answer | ({"logprobs": self.logprobs} if self.logprobs else {})


def _print_all(answer: dict[str, Any]) -> None:
    """Prints several answers, each below a line with its index."""
    for index, each in enumerate((answer, *answer["further"])):
        print(f"[{index}]\n{shown(each['text'])}")


def _summarise(answer: dict[str, Any]) -> None:
    """Prints one line on stderr, which leaves stdout to the answer."""
    usage, timings, workers = answer["usage"], answer["timings"], answer["workers"]
    answers = (answer, *answer.get("further", ()))
    num_output_tokens = sum(each["usage"]["output_tokens"] for each in answers)
    parts = [
        answer["request_id"],
        f"{usage['prompt_tokens']} tokens in ({usage['cached_tokens']} cached), {num_output_tokens} out",
        ", ".join(dict.fromkeys(each["finish_reason"] for each in answers)),
        " -> ".join(dict.fromkeys(filter(None, (workers["prefill"], workers["decode"])))),
        *(f"{label} {timings[name]:.0f} ms" for name, label in _SHOWN_TIMINGS if name in timings),
    ]
    print(printable(" | ".join(parts)), file=sys.stderr)
