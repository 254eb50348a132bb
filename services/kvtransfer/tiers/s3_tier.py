"""Keeps blocks in a bucket of S3-compatible object storage, which several workers share. Needs the extra `s3`.

The client is obstore: the object_store crate of Apache Arrow, whose requests have limits of time from end to end. Owns:
keys, objects, how many requests are under way, and time limits. Never: expiry, which is the bucket's (by a lifecycle
rule).
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from services.core.errors import ConfigError
from services.core.hashing import BlockHash
from services.core.printable import printable
from services.kv.regions import Buffer
from services.kvtransfer.tiers.entry import LABEL_BYTES, Label, fingerprint_bytes, unpack_block
from services.kvtransfer.tiers.tier import BlockTarget, TierFailed, TierFull

log = logging.getLogger(__name__)

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")

_CONNECT_S = 1.0
WHOLE_S = 2.0
"""How long a request may take, from its connection to the last byte of its answer."""
_RETRY_S = 0.5
"""A request that failed sooner is made once more: servers close idle connections."""
_AT_ONCE = 16
_BYTES_AT_ONCE = 16 << 20
"""The size of all objects that one read or write has under way, about."""
_MOST_THREADS = 64
_MOST_ERROR_CHARS = 200
_URL = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]*)(?:/([A-Za-z0-9/!_.*'()=-]*))?")


class S3Tier:
    """Has an object for each block of a layout: the block's label and the block. What comes back is believed no more
    than what a disk gives, and what is not what it should be is deleted, so that it can be written again."""

    name = "s3"

    def __init__(self, url: str, fingerprint: str, block_bytes: int) -> None:
        """`url` is s3://BUCKET/PREFIX; the rest comes from the environment (`AWS_ENDPOINT_URL`, `AWS_REGION`,
        `AWS_ACCESS_KEY_ID`, …). A thread asks the server at once, and warns of what would keep the tier from being of
        use. Raises ConfigError if the URL is none."""
        self._layout = fingerprint
        self._fingerprint = fingerprint_bytes(fingerprint)
        self._block_bytes = block_bytes
        self._object_bytes = LABEL_BYTES + block_bytes
        self._at_once = max(1, min(_AT_ONCE, _BYTES_AT_ONCE // self._object_bytes))
        self._mode: Literal["create", "overwrite"] = "create"
        """How objects are written: only where there is none yet, if the server can do that."""
        if os.environ.get("AWS_CONDITIONAL_PUT", "").lower() == "disabled":
            self._mode = "overwrite"
        if (parts := _URL.fullmatch(url)) is None:
            raise ConfigError("--kv-backend: is no URL of the form s3://BUCKET/PREFIX")
        self._bucket = parts[1]
        try:
            self._store = S3Store(
                self._bucket,
                prefix=parts[2] or None,
                config={"disable_bulk_delete": True},  # not every server has it
                client_options={
                    "connect_timeout": timedelta(seconds=_CONNECT_S),
                    "timeout": timedelta(seconds=WHOLE_S),
                    "allow_http": True,  # only an endpoint that says http:// is asked by it
                },
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=_RETRY_S)},
            )
        except Exception as error:  # whatever the client makes of the environment
            raise ConfigError(f"--kv-backend: {_words(error)}") from error
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "kv-s3")
        self._threads.submit(self._look)

    @property
    def num_bytes(self) -> int:
        """Returns 0: what the bucket holds is not this worker's alone."""
        return 0

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        # One at first: mostly the first is missing, and each question costs.
        until_s = time.monotonic() + WHOLE_S  # whoever asks may have given up, and this is a thread of few
        for number, there in enumerate(self._in_order(self._has, hashes, at_once=1)):
            if not there or time.monotonic() > until_s:
                return number
        return len(hashes)

    def read(self, hashes: Sequence[BlockHash], memory: BlockTarget, targets: Sequence[int]) -> int:
        for number, value in enumerate(self._in_order(self._get, hashes, at_once=self._at_once)):
            if value is None:
                return number
            block = unpack_block(value, self._fingerprint, hashes[number], self._block_bytes)
            if block is None:
                self._discard(hashes[number])
                return number
            memory.write_blocks([targets[number]], [block])
        return len(hashes)

    def write(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> None:
        objects = (  # copied on this thread: the caller may change its blocks as soon as this has raised
            (hash, Label.of(self._fingerprint, hash, block).pack() + bytes(block))
            for hash, block in zip(hashes, blocks, strict=True)
        )
        for _ in self._in_order(self._put, objects, at_once=self._at_once):
            pass

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        del self._store  # with its connections

    # -- inside --------------------------------------------------------------------------------------------------------

    def _in_order(
        self, ask: Callable[[_Asked], _Answer], questions: Iterable[_Asked], at_once: int
    ) -> Iterator[_Answer]:
        """Yields the answers in their order. `at_once` of them are asked for together, later more."""
        questions = iter(questions)
        waiting: deque[Future[_Answer]] = deque()
        try:
            while True:
                while len(waiting) < at_once and (question := next(questions, None)) is not None:
                    waiting.append(self._threads.submit(ask, question))
                if not waiting:
                    return
                yield waiting.popleft().result()
                at_once = min(2 * at_once, self._at_once)
        finally:
            for future in waiting:
                future.cancel()

    def _path(self, hash: BlockHash) -> str:
        return f"{self._layout}/{hash.hex()}"

    # -- on the tier's threads -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Warns if the bucket cannot be read. It asks for what is not there: some servers say only then that one must
        be allowed to list a bucket to be told that something is missing."""
        try:
            obstore.get(self._store, self._layout)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                log.warning("--kv-backend: there is no bucket %s, so nothing is kept in it", self._bucket)
        except (PermissionDeniedError, UnauthenticatedError) as error:
            log.warning(
                "--kv-backend: access to the bucket %s is denied; blocks need GetObject, PutObject, DeleteObject and "
                "ListBucket: %s",
                self._bucket,
                _words(error),
            )
        except Exception as error:
            log.warning("--kv-backend: the bucket %s cannot be read now: %s", self._bucket, _words(error))

    def _has(self, hash: BlockHash) -> bool:
        with _asking():
            try:
                num_bytes = obstore.head(self._store, self._path(hash))["size"]
            except FileNotFoundError:
                return False
        if num_bytes != self._object_bytes:
            self._discard(hash)
        return num_bytes == self._object_bytes

    def _get(self, hash: BlockHash) -> bytes | None:
        """Returns the object; None if there is none of the right size."""
        value = b""
        with _asking():
            try:
                result = obstore.get(self._store, self._path(hash))
            except FileNotFoundError:
                return None
            if result.meta["size"] == self._object_bytes:
                for part in result.stream(self._object_bytes):
                    value += bytes(part)
                    if len(value) > self._object_bytes:  # whatever its size was said to be
                        break
        if len(value) != self._object_bytes:
            self._discard(hash)
            return None
        return value

    def _put(self, labelled: tuple[BlockHash, bytes]) -> None:
        hash, value = labelled
        with _asking(writing=True), suppress(AlreadyExistsError):
            obstore.put(self._store, self._path(hash), value, mode=self._mode, use_multipart=False)

    def _discard(self, hash: BlockHash) -> None:
        """Deletes an object that is not what it should be: it would be read in vain and never written again."""
        log.debug("%s in the bucket %s is damaged and deleted", self._path(hash), self._bucket)
        with suppress(Exception):  # the bucket may only be read
            obstore.delete(self._store, self._path(hash))


@contextmanager
def _asking(writing: bool = False) -> Iterator[None]:
    """Makes a TierFailed of whatever the client raises."""
    try:
        yield
    except Exception as error:
        # Whoever may not write, or has no room, may still read.
        if writing and (isinstance(error, PermissionDeniedError) or " 507 " in str(error)):
            raise TierFull(f"the bucket takes no blocks: {_words(error)}") from error
        raise TierFailed(f"the server does not answer as it should: {_words(error)}") from error


def _words(error: Exception) -> str:
    """Returns what the client and the server say, without markup."""
    text = str(error).split("\n\nDebug source")[0].rpartition(" - ")[2]
    text = " ".join(re.sub(r"<[^<>]*>", " ", text).split()) or type(error).__name__
    return printable(text)[:_MOST_ERROR_CHARS]
