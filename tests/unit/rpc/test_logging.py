"""Tests log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging

import pytest

from services.core.errors import ConfigError
from services.rpc.logging import MOST_CHARS, configure_logging, ids, log_ids

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def restored_root():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def configured(form: str) -> io.StringIO:
    stream = io.StringIO()
    configure_logging("baton-decode", "decode-0", form=form, stream=stream)
    return stream


def test_json_has_the_ids_of_the_record_or_of_the_context():
    stream = configured("json")
    logger = logging.getLogger("services.worker.session")
    with log_ids("req-1", TRACEPARENT):
        logger.info("lease %s open", "abc")
        logger.info("another's", extra=ids("req-2"))
    logger.info("nobody's")
    logger.debug("not at this level")
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "lease abc open"
    assert (first["service"], first["instance"]) == ("baton-decode", "decode-0")
    assert (first["request_id"], first["trace_id"]) == ("req-1", TRACEPARENT.split("-")[1])
    assert second["request_id"] == "req-2"
    assert "request_id" not in third
    assert first["time"].endswith("Z")


def test_json_keeps_a_traceback_on_one_line():
    stream = configured("json")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: bad" in json.loads(line)["error"]


@pytest.mark.parametrize("form", ["console", "json"])
def test_what_a_peer_sends_makes_no_endless_line(form: str):
    stream = configured(form)
    logging.getLogger("x").warning("no such socket: %s", "s" * 4_000_000, extra=ids("r" * 2_000_000))
    (line,) = stream.getvalue().splitlines()
    assert len(line) < MOST_CHARS + 1000
    assert f" and {4_000_000 + len('no such socket: ') - MOST_CHARS} more characters" in line
    assert "r" * 256 in line
    assert "r" * 257 not in line


def test_console_lines_are_short():
    stream = configured("console")
    logging.getLogger("services.worker.session").warning("session %d open", 3, extra=ids("req-1", TRACEPARENT))
    line = stream.getvalue().rstrip()
    assert "WARNING decode-0 services.worker.session: session 3 open [request_id=req-1 trace_id=0af7" in line


@pytest.mark.parametrize("wrong", [{"level": "loud"}, {"form": "xml"}])
def test_wrong_settings_name_the_flag(wrong):
    with pytest.raises(ConfigError, match="--log-"):
        configure_logging("s", "i", **wrong)


NASTY = "\x1b[2J\x1b]0;owned\x07\r\nINFO forged line\x00\x7f\x9b31m\u202egnitirw\u2028\u200b\ud800"


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("where", ["message", "argument", "id", "traceback", "name"])
def test_nothing_that_is_logged_steers_a_terminal(form, where):
    """A client may have written anything: request ids, header values, model names, parts of its text."""
    stream = configured(form)
    logger = logging.getLogger("services.x" if where != "name" else f"services.{NASTY}")
    match where:
        case "message" | "name":
            logger.warning(NASTY if where == "message" else "x")
        case "argument":
            logger.warning("model %s", NASTY)
        case "id":
            logger.warning("x", extra=ids(NASTY))
        case "traceback":
            try:
                raise ValueError(NASTY)
            except ValueError:
                logger.exception("x")
    text = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in text)
    text.encode()
    lines = text.splitlines()
    assert not [line for line in lines if line.startswith("INFO forged")]
    if where != "traceback" or form == "json":
        assert len(lines) == 1
    assert "forged line" in text, "it is escaped, not lost"


def test_other_alphabets_stay_as_they_are():
    stream = configured("console")
    logging.getLogger("services.x").warning("naïve — 你好 🙂 Ελλάδα")
    assert "naïve — 你好 🙂 Ελλάδα" in stream.getvalue()
