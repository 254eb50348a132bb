"""Runs `baton`: finds the command, runs it, and turns every error into one line and an exit status.

Owns: the list of commands and the error boundary. Never: what a command does, nor its imports; a command's module is
loaded only when it is called, so that `baton --help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.core.errors import BatonError, ConfigError
from services.core.home import baton_home
from services.core.printable import printable

# Maps a command to (module, what it does). A module has `main(arguments, prog) -> exit status`.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("services.cli.up", "start a local cluster: router, workers and their supervisor"),
    "router": ("services.cli.service", "run one router"),
    "prefill": ("services.cli.service", "run one prefill worker"),
    "decode": ("services.cli.service", "run one decode worker"),
    "mixed": ("services.cli.service", "run one worker that does both"),
    "kvtransfer": ("services.cli.service", "run one store: host memory that keeps KV for workers"),
    "generate": ("services.cli.generate", "send one prompt and print the answer as it comes"),
    "run": ("services.cli.run", "answer one prompt, with a cluster of its own if none runs"),
    "chat": ("services.cli.chat", "talk to the model"),
    "status": ("services.cli.status", "show the workers, their load and their blocks"),
    "top": ("services.cli.top", "watch workers, pairs and requests, live in the terminal"),
    "slo": ("services.cli.slo", "show how many requests met the latency objectives"),
    "explain": ("services.cli.explain", "show why a request was placed where it was, or what it waits for"),
    "drain": ("services.cli.drain", "take a worker out of service without losing a request"),
    "health": ("services.cli.health", "ask one process whether it serves (for container checks)"),
    "trace": ("services.cli.trace", "show where a request spent its time"),
    "simulate": ("services.cli.simulate", "run a trace through a cluster in virtual time"),
    "plan": ("services.cli.plan_cluster", "find the cheapest cluster that serves a trace within an objective"),
    "calibrate": ("services.cli.calibrate", "write what a running cluster's steps cost, for simulate"),
    "kv": ("services.cli.kv", "reckon how much memory KV takes, and how long it takes to move"),
    "keys": ("services.cli.keys", "make an API key for a tenant, or digest one for the tenants file"),
    "certs": ("services.cli.certs", "make a CA and certificates, to try TLS out with"),
    "usage": ("services.cli.usage", "sum usage logs of routers by tenant and model"),
    "models": ("services.cli.models", "list the models on this machine, or fetch one"),
}

_UNWRITABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOSPC)
"""What a folder that cannot be written, or is none, answers."""
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_NO_ANSWER = 3
"""What ends a command whose status 1 is an answer, before it has one: no router that could be asked, for example."""
_ANSWERS_BY_STATUS = ("plan",)
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
_STDERR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `baton ARGV` and returns the exit status. Never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    failure = EXIT_NO_ANSWER if arguments and arguments[0] in _ANSWERS_BY_STATUS else EXIT_FAILURE
    _prepare_streams()
    message, is_of_unnamed = "", False
    try:
        status = _dispatch(arguments)
    except SystemExit as exit_:  # argparse raises it after --help
        status = exit_.code if isinstance(exit_.code, int) else EXIT_FAILURE
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone: `baton status | head -1`
        status = failure
    except ConfigError as error:
        status, message = EXIT_USAGE, str(error)
    except BatonError as error:
        status, message = failure, str(error)
    except OSError as error:
        status, message, is_of_unnamed = failure, f"{error}{_advice(error)}", error.filename is None
    except Exception as error:  # the error boundary: a person reads this
        if os.environ.get("BATON_DEBUG"):
            traceback.print_exc()
        status, message = failure, f"{type(error).__name__}: {error} (set BATON_DEBUG=1 for the whole story)"
    unprinted = _unprinted(end="\n" if is_of_unnamed else "")
    if unprinted is not None:
        status = status or failure
        if not isinstance(unprinted, BrokenPipeError) and (is_of_unnamed or not message):
            message = f"standard output: {unprinted.strerror}"
    if message:
        _print_error(arguments, message)
    return status


def _prepare_streams() -> None:
    """Opens /dev/null in the place of each standard stream that the caller has closed: the next file would get its
    number. What standard output cannot encode is escaped, as it is on standard error."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(os.devnull, mode)  # noqa: SIM115  open as long as the process
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lossy(sys.stderr)


class _LossyFile(io.FileIO):
    """Drops what cannot be written, on a full disk or to a reader that has gone."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def _lossy(stream: Any) -> io.TextIOWrapper:
    """Returns standard error that never fails: no bar, word or log line is worth a command, and nobody could be told.
    Below its lines is no buffer, in which what failed would stay until the last flush."""
    raw: Any = _LossyFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, errors="backslashreplace", line_buffering=True)


def _advice(error: OSError) -> str:
    if error.errno in _UNWRITABLE and error.filename:
        with contextlib.suppress(ConfigError):  # there is no home
            path, home = Path(str(error.filename)), baton_home()
            if path.is_relative_to(home) or home.is_relative_to(path):  # it could not be made in a folder above it
                return "; set BATON_HOME to a folder that can be written"
    return ""


def _unprinted(end: str) -> OSError | None:
    """Writes what was printed, and `end`, by which one learns whether what failed was standard output. Returns why it
    cannot be; it is dropped then, or the interpreter's last flush would fail as well."""
    try:
        print(end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        from importlib.metadata import version

        print("baton", version("baton-serving"))
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        from services.cli.arguments import not_a_command

        raise ConfigError(not_a_command(command, COMMANDS))
    # Read when grpc is imported, here and in child processes: its own lines say nothing that Baton does not say.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    module = importlib.import_module(COMMANDS[command][0])
    status: int = module.main(rest, f"baton {command}")
    return status


def _usage() -> str:
    commands = "\n".join(f"  {name:<12}{help_}" for name, (_, help_) in COMMANDS.items())
    return (
        "usage: baton COMMAND [OPTIONS]   (baton COMMAND --help lists its options)\n\n"
        "LLM serving with prefill and decode on separate workers.\n\n" + commands
    )


def _print_error(arguments: list[str], message: str) -> None:
    prog = f"baton {arguments[0]}" if arguments and arguments[0] in COMMANDS else "baton"
    # One line without control characters, whatever the message holds: it may come from a peer.
    line = printable(textwrap.shorten(message, width=2000, placeholder=" ..."))
    print(f"{prog}: error: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
