"""Stands for vLLM behind a worker: it speaks `services.vllm.messages` as `services.vllm.inside` does, and computes
nothing. Usage: SCRIPTED_CONTROLS=FOLDER python -m tests.support.scripted_vllm SOCKET ARGUMENTS.

The "KV" of a token is its id, in blocks of the ranks' own and in slots, and the next token is a hash of what the ranks
have there: a block that is missing, or another's, shows as another token. Its processes are vLLM's: a front, a core
below it, and below that a process for each rank, where there are several; else the core has the only one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from services.vllm import messages
from services.vllm.inside.link import Link
from services.vllm.messages import JsonMessage, Lines
from tests.support.scripted_core import Core
from tests.support.scripted_ranks import OtherRank, Rank
from tests.support.scripted_vllm_controls import Controls

_SPARE = 1
"""vLLM keeps a block for itself."""


class Pipe:
    """Is one end of a stream of messages between two processes of vLLM."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._lines, self._arrived = end, Lines(), list[JsonMessage]()

    def send(self, message: JsonMessage) -> None:
        try:
            self._end.sendall(messages.encode(message))
        except OSError:
            _end()

    def receive(self) -> JsonMessage:
        while not self._arrived:
            data = self._end.recv(1 << 18)
            if not data:
                _end()
            self._arrived += self._lines.feed(data)
        return self._arrived.pop(0)

    def take(self, wait: bool) -> list[JsonMessage]:
        """Returns what has arrived; with `wait`, at least one message."""
        if wait:
            self._arrived.insert(0, self.receive())
        self._end.setblocking(False)
        try:
            while data := self._end.recv(1 << 18):
                self._arrived += self._lines.feed(data)
            _end()
        except BlockingIOError:
            arrived, self._arrived = self._arrived, []
            return arrived
        finally:
            self._end.setblocking(True)


def _end() -> NoReturn:
    """Ends this process some time after another, as vLLM's do."""
    time.sleep(0.3)
    os._exit(1)


def main() -> None:
    path, arguments = sys.argv[1], json.loads(sys.argv[2])
    controls = Controls(Path(os.environ["SCRIPTED_CONTROLS"]))
    if controls.is_set("exit"):
        sys.exit(f"there is no such model: {arguments['engine']['model']}")
    mine, its = socket.socketpair()
    # Before any thread, and before the connection, which would stay open in the child.
    if os.fork() == 0:
        mine.close()
        run_core(path, arguments["engine"], Pipe(its), controls)
        os._exit(0)
    its.close()
    link = Link(path, messages.FRONT)
    if controls.is_set("broken"):
        link.send(messages.BROKEN, error="ValueError: this model is none")
        os._exit(1)
    Front(link, Pipe(mine), controls).run(arguments["engine"])


def run_core(path: str, engine: dict[str, Any], front: Pipe, controls: Controls) -> None:
    num_ranks = engine.get("tensor_parallel_size", 1)
    num_blocks, block_size = engine.get("num_gpu_blocks_override", 129), engine.get("block_size", 16)
    ranks: list[Rank | OtherRank] = []
    if num_ranks > 1:
        for number in range(num_ranks):
            mine, its = socket.socketpair()
            if os.fork() == 0:
                mine.close()
                Rank(path, number, num_ranks, num_blocks, block_size, controls).serve(Pipe(its))
                os._exit(0)
            its.close()
            ranks.append(OtherRank(Pipe(mine)))
    link = Link(path, messages.CORE)
    if num_ranks == 1:
        ranks.append(Rank(path, 0, 1, num_blocks, block_size, controls))
    for rank in ranks:
        rank.wait_until_ready()
    Core(link, front, ranks, num_blocks - _SPARE, block_size, engine | facts(engine), controls).run()


class Front:
    def __init__(self, link: Link, core: Pipe, controls: Controls) -> None:
        self._link, self._core, self._controls = link, core, controls
        self._preempted = 0

    def run(self, engine: dict[str, Any]) -> None:
        if self._core.receive()["kind"] != "ready":
            os._exit(1)
        while self._controls.is_set("never-ready"):
            time.sleep(0.01)
        self._link.send(messages.READY, **facts(engine))
        threading.Thread(target=self._tell, daemon=True).start()
        lines = Lines()
        while data := self._link.socket.recv(1 << 18):
            for message in lines.feed(data):
                if message["kind"] == messages.ADD and self._controls.is_set("refuse"):
                    self._link.send(messages.REFUSED, id=message["id"], error="ValueError: it is refused")
                else:
                    self._core.send(message)
        os._exit(0)

    def _tell(self) -> None:
        while True:
            message = self._core.receive()
            if message["kind"] == messages.OUTPUT:
                if message["finished"] is not None:
                    self._controls.wait_while("hold-output")
                self._link.send(messages.OUTPUT, outputs=[[message["id"], message["tokens"], message["finished"]]])
            else:
                self._link.send(message.pop("kind"), **message)


def facts(engine: dict[str, Any]) -> JsonMessage:
    model = json.loads((Path(engine["model"]) / "config.json").read_text())
    return {
        "version": "0.32.0",
        "dtype": "float32",  # a key and a value of one element each: the 8 bytes of a token
        "max_model_len": engine.get("max_model_len") or model["max_position_embeddings"],
        "vocab_size": model["vocab_size"],
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": engine.get("scripted_head_dim", 1),
        "block_size": engine.get("block_size", 16),
        "sharding": [engine.get("tensor_parallel_size", 1), 1],
        "quantization": "none",
        "config": [engine.get("hf_overrides", {}), "auto"],
    }


if __name__ == "__main__":
    main()
