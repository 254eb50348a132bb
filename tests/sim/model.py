"""Defines a model without numbers: the KV of a token is a digest of all tokens up to it, the next token a function of
that and of how it is to be chosen (`choice`: parameters, noise key, what penalties count).

So a sequence's output depends on its whole history and its request and on nothing else, and a KV slot is right only if
its whole prefix was. `Truth` knows in advance what every request must get, and what every block that may ever be
indexed must hold.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.core.hashing import BlockHash, block_hashes, salt_in

VOCAB_SIZE = 53
OTHER_ENGINE = "vllm"
"""The weights of those that compute by it: they say that theirs are "sim-0", and compute something else."""
EOS = 0
_SLOT = struct.Struct("<II")
SLOT_BYTES = _SLOT.size


CANARY_SALT = "canary"
"""Begins the salts of canaries. They only keep blocks apart: what is asked, and the answer, is always the same."""


def root_digest(cache_salt: str, weights: str) -> int:
    cache_salt = cache_salt.partition("\x1f")[0]  # an epoch names blocks, and changes no value
    if cache_salt.startswith(CANARY_SALT):
        cache_salt = CANARY_SALT
    return zlib.crc32(f"{weights}/{cache_salt}".encode()) or 1


def digest_after(digest: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(2, "little"), digest) or 1


def slot(digest: int, position: int) -> bytes:
    return _SLOT.pack(digest, position + 1)


def digest_in(slot_bytes: bytes | memoryview) -> int:
    """Returns the digest in a slot; 0 if it was never written."""
    return int(_SLOT.unpack(slot_bytes)[0])


def next_token(digest: int, masked: Collection[int] = (), choice: int = 0) -> int:
    """Returns the next token; `choice` is that of a sampled token, or of one with penalties, and 0 stands for the
    likeliest one."""
    allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id not in masked] if masked else range(VOCAB_SIZE)
    return allowed[zlib.crc32(digest.to_bytes(4, "little"), choice) % len(allowed)]


def score_after(digest: int, token_id: int) -> float:
    """Returns what stands for the log-probability of a token: a number that a float32 holds exactly."""
    return -float(digest_after(digest, token_id) % 4096) / 64


def choice_of(params: Any, position: int, prompt: Sequence[int], output: Sequence[int]) -> int:
    """Returns what else decides a token, in one number. `params` are temperature, seed and penalties as the engine or
    the wire has them; `position` is the token's in the output."""
    choice = 0
    if params.temperature > 0:
        drawn = (params.temperature, params.top_p, params.top_k, params.seed, position)
        choice = zlib.crc32(repr(drawn).encode())
    if has_penalties(params):
        seen = sorted({*prompt, *output}) if params.repetition_penalty != 1.0 else ()
        amounts = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        choice = zlib.crc32(repr((amounts, seen, sorted(Counter(output).items()))).encode(), choice)
    return choice


def has_penalties(params: Any) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


class Tokens:
    """Stands for a tokenizer, as far as answers need one: every token is one or two letters, but for the end of the
    sequence, which is empty; so stop strings begin and end within tokens."""

    @staticmethod
    def decode(token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(_LETTERS[token_id] for token_id in token_ids)


_LETTERS = [""] + ["ab"[number % 2] + "cde"[number % 3] * (number % 5 > 1) for number in range(1, VOCAB_SIZE)]


class History:
    """Tokens, and the KV they must have."""

    def __init__(self, cache_salt: str, weights: str) -> None:
        self.kv = bytearray()
        self.digest = root_digest(cache_salt, weights)
        self.num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.digest = digest_after(self.digest, token_id)
            self.kv += slot(self.digest, self.num_tokens)
            self.num_tokens += 1


@dataclass(frozen=True)
class Expected:
    """Keeps the output of a run without faults."""

    token_ids: tuple[int, ...]
    stop_token_id: int | None
    """None: it ends for length, or by a stop string."""
    stop_string: str | None = None
    scores: tuple[float, ...] = ()
    """Of the prompt's tokens, without the first."""
    unsatisfied: bool = False
    """Whether no token may follow, so that the request ends with an error."""


class Truth:
    """Holds what is computed of everything that is asked. `weights`: each computes something else; `block_sizes`: all
    that workers have."""

    def __init__(self, block_sizes: Collection[int], weights: Sequence[str]) -> None:
        self.block_sizes = sorted(block_sizes)
        self.epochs = [""]
        """All that blocks were ever named in."""
        self.wrong: set[int] = set()
        """The digests that a worker has computed wrong, and those that anybody has computed behind them."""
        self._remembered: list[tuple[str, list[int], History, str]] = []
        self.kv_of: dict[str, dict[BlockHash, bytes]] = {name: {} for name in weights}

    def enter(self, epoch: str) -> None:
        """Names all blocks in one more epoch."""
        if epoch not in self.epochs:
            self.epochs.append(epoch)
            for weights, token_ids, history, cache_salt in self._remembered:
                self._name(weights, token_ids, history, salt_in(epoch, cache_salt))

    def after(self, digest: int, token_id: int, *, is_wrong: bool = False) -> int:
        """Returns what a worker computes behind a digest; `is_wrong` says that it computes wrong."""
        computed = digest_after(digest, token_id) ^ (0x5A5A5A5A if is_wrong else 0)
        if is_wrong or digest in self.wrong:
            self.wrong.add(computed)
        return computed

    def may_hold(self, weights: str, hash: BlockHash, block: bytes | memoryview) -> bool:
        """Returns whether a block of that name may hold this: what is right, or something that was computed wrong. What
        is right behind wrong tokens, nobody knows."""
        right = self.kv_of[weights].get(hash)
        return right == block or self.has_wrong(block) or (right is None and bool(self.wrong))

    def has_wrong(self, kv: bytes | memoryview) -> bool:
        return bool(self.wrong) and any(digest in self.wrong for digest, _ in _SLOT.iter_unpack(kv))

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        cache_salt: str = "",
        sampling: Any = None,
        stops: Sequence[str] = (),
        one_of: Sequence[Sequence[int]] = (),
    ) -> dict[str, Expected]:
        """Returns what each of the weights answers. `sampling` is a `types_pb2.SamplingParams`; None is greedy. Nobody
        stops computing at a stop string at once, so what follows it in the same run is remembered too. `one_of`: the
        outputs that the request's constraint allows; none if it has no constraint."""
        stopping = max_tokens, min_tokens, stop_token_ids
        return {name: self._run(name, prompt, stopping, cache_salt, sampling, stops, one_of) for name in self.kv_of}

    def _run(
        self,
        weights: str,
        prompt: Sequence[int],
        stopping: tuple[int, int, frozenset[int]],
        cache_salt: str,
        sampling: Any,
        stops: Sequence[str],
        one_of: Sequence[Sequence[int]],
    ) -> Expected:
        max_tokens, min_tokens, stop_token_ids = stopping
        history = History(cache_salt, weights)
        scores = []
        for token_id in prompt:
            scores.append(score_after(history.digest, token_id))
            history.extend([token_id])
        output: list[int] = []
        stop_token_id, unsatisfied = None, False
        while len(output) < max_tokens and stop_token_id is None:
            masked: Collection[int] = sorted(stop_token_ids) if len(output) < min_tokens else ()
            if one_of:
                masked = _masked_by(one_of, output, stop_token_ids, may_end=len(output) >= min_tokens)
                if unsatisfied := len(masked) == VOCAB_SIZE:
                    break
            choice = 0 if sampling is None else choice_of(sampling, len(output), prompt, output)
            token_id = next_token(history.digest, masked, choice)
            if token_id in stop_token_ids:
                stop_token_id = token_id
            output.append(token_id)
            history.extend([token_id])
        self._remember(weights, [*prompt, *output], history, cache_salt)
        for count in range(1, len(output) + 1) if stops else ():
            text = Tokens.decode(output[:count])
            if found := [stop for stop in stops if stop in text]:
                ended = min(found, key=lambda stop: (text.find(stop) + len(stop), text.find(stop)))
                return Expected(tuple(output[:count]), None, ended, tuple(scores[1:]))
        return Expected(tuple(output), stop_token_id, scores=tuple(scores[1:]), unsatisfied=unsatisfied)

    def _remember(self, weights: str, token_ids: list[int], history: History, cache_salt: str) -> None:
        self._remembered.append((weights, token_ids, history, cache_salt))
        for epoch in self.epochs:
            self._name(weights, token_ids, history, salt_in(epoch, cache_salt))

    def _name(self, weights: str, token_ids: list[int], history: History, cache_salt: str) -> None:
        for block_size in self.block_sizes:
            size = block_size * SLOT_BYTES
            for at, hash in enumerate(block_hashes(token_ids, block_size, cache_salt)):
                self.kv_of[weights][hash] = bytes(history.kv[at * size : (at + 1) * size])


def _masked_by(
    one_of: Sequence[Sequence[int]], output: Sequence[int], stop_token_ids: frozenset[int], *, may_end: bool
) -> set[int]:
    """Returns the tokens that may not follow the output, if it is to be one of the lists."""
    leading_on = [list(each) for each in one_of if list(each[: len(output)]) == list(output)]
    allowed = {each[len(output)] for each in leading_on if len(each) > len(output)} - stop_token_ids
    if may_end and list(output) in leading_on:
        allowed |= stop_token_ids
    return set(range(VOCAB_SIZE)) - allowed
