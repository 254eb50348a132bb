"""Tests that a chat template that is not to be trusted is rendered elsewhere, within time and memory, and leaves
nothing behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.core.errors import InvalidRequest
from services.core.memory import peak_memory_bytes
from services.router.text.chat_template import ChatTemplate
from services.router.text.template_process import TemplateProcess
from tests.support.patience import Patience
from tests.support.text_model import TEMPLATE

pytestmark = pytest.mark.process

MESSAGES = [{"role": "user", "content": "hi\n🙂"}, {"role": "assistant", "content": '"\\'}]
PATIENCE_S = 60.0
EQUAL = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(30) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)
"""Compares two lists in one operation that takes minutes, and holds the interpreter lock."""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
INDENTED = "{{ [1, 2]|tojson(indent=1500000000)|length }}"
"""Makes a text of gigabytes in one operation."""
ONLY_ONE = "{% if messages[0].content == 'go' %}" + EQUAL + "{% else %}fine{% endif %}"


def saying(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@contextmanager
def process(source: str, *, within_s: float = 20.0) -> Iterator[TemplateProcess]:
    template = TemplateProcess(source, {"bos_token": "<s>"}, within_s=within_s)
    yield template
    pid = template.pid
    template.close()
    assert template.pid is None
    assert pid is None or not is_alive(pid)


def is_alive(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def until_dead(pid: int) -> None:
    began_s = time.monotonic()
    while is_alive(pid) and pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - began_s < PATIENCE_S
        time.sleep(0.05)


@pytest.mark.parametrize("source", [TEMPLATE, "{{ bos_token }}{{ messages[0].content }}", "{{ messages|tojson }}"])
def test_it_renders_what_the_template_itself_does(source: str) -> None:
    with process(source) as template:
        assert template.render(MESSAGES) == ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES)
        pid = template.pid
        assert template.render(saying("x")) == ChatTemplate(source, {"bos_token": "<s>"}).render(saying("x"))
        assert template.pid == pid, "one process renders all chats"


def test_a_long_chat_fits() -> None:
    with process(TEMPLATE) as template:
        assert len(template.render(saying("🙂" * (1 << 19)))) > 1 << 19


def test_a_refusal_is_the_templates_own_and_harmless() -> None:
    with process("{{ raise_exception('no system\\x1b[2J message' ~ 'x' * 9999) }}") as template:
        with pytest.raises(InvalidRequest, match="refuses them: no system") as refused:
            template.render(MESSAGES)
        assert refused.value.description.isprintable()
        assert len(refused.value.description) < 1000


@pytest.mark.parametrize("source", [EQUAL, ENDLESS], ids=["one operation", "many"])
def test_one_that_takes_too_long_is_given_up(source: str) -> None:
    with process(source, within_s=0.5) as template:
        for _ in range(2):  # each time another process
            with pytest.raises(InvalidRequest, match=r"took more than 0\.5 s"):
                template.render(MESSAGES)
            assert template.pid is None


def test_the_next_chat_is_rendered_by_another_process() -> None:
    with process(ONLY_ONE, within_s=2.0) as template:
        with pytest.raises(InvalidRequest, match="took more than 2 s"):
            template.render(saying("go"))
        assert template.render(saying("x")) == "fine"


def rendering(template: TemplateProcess) -> tuple[threading.Thread, list[Exception]]:
    """Returns a thread that renders with the template, and the list to which its refusal is added."""
    failures: list[Exception] = []

    def render() -> None:
        try:
            template.render(MESSAGES)
        except InvalidRequest as error:
            failures.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    return thread, failures


def test_other_threads_go_on_meanwhile() -> None:
    """The one operation would hold their interpreter's lock until its end."""
    with process(EQUAL, within_s=2.0) as template:
        thread, failures = rendering(template)
        num_turns, patience = 0, Patience(PATIENCE_S)
        while thread.is_alive():
            assert not patience.is_over()
            thread.join(0.01)
            num_turns += 1
        assert failures
        assert num_turns > 20


def test_one_that_makes_something_huge_costs_this_process_nothing() -> None:
    before = peak_memory_bytes()
    with process(INDENTED) as template, pytest.raises(InvalidRequest, match="MemoryError"):
        template.render(MESSAGES)
    assert peak_memory_bytes() - before < 200 << 20


def test_a_text_out_of_all_proportion_is_refused() -> None:
    with process("{% for i in range(30) %}{{ 'x' * 100000 }}{% endfor %}") as template:
        with pytest.raises(InvalidRequest, match="made 3000000 bytes of them"):
            template.render(MESSAGES)
        assert template.pid is not None, "it harms nothing, and goes on"


@pytest.mark.parametrize("source", ["{{ '\\ud800' }}", "{% for %}"], ids=["no text", "no template"])
def test_one_that_makes_no_sense_is_refused(source: str) -> None:
    with process(source) as template, pytest.raises(InvalidRequest):
        template.render(MESSAGES)


def test_a_process_that_somebody_killed_is_started_again() -> None:
    with process(TEMPLATE) as template:
        expected = template.render(MESSAGES)
        assert template.pid is not None
        os.kill(template.pid, signal.SIGKILL)
        os.waitid(os.P_PID, template.pid, os.WEXITED | os.WNOWAIT)
        assert template.render(MESSAGES) == expected


def test_it_is_given_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", "very-secret-indeed")
    with process(TEMPLATE) as template:
        template.render(MESSAGES)
        assert b"secret" not in pathlib.Path(f"/proc/{template.pid}/environ").read_bytes()


def test_closing_ends_a_chat_that_is_being_rendered() -> None:
    template = TemplateProcess(EQUAL, {}, within_s=300.0)
    thread, failures = rendering(template)
    patience = Patience(PATIENCE_S)
    while (pid := template.pid) is None:
        assert thread.is_alive()
        assert not patience.is_over()
        thread.join(0.01)
    template.close()
    thread.join(PATIENCE_S)
    assert failures
    assert not is_alive(pid)
    with pytest.raises(InvalidRequest, match="no longer"):
        template.render(MESSAGES)


_ROUTER = """
import sys, threading, psutil
from services.router.text.template_process import TemplateProcess
template = TemplateProcess(sys.argv[1], {}, within_s=5.0)
rendering = threading.Thread(target=template.render, args=([],), daemon=True)
rendering.start()
if sys.argv[2] == "idle":
    rendering.join()
else:
    while template.pid is None or psutil.Process(template.pid).cpu_times().user < 0.4:
        assert rendering.is_alive()
print(template.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("source", "what"),
    [
        pytest.param("x", "idle", id="idle"),
        pytest.param(ENDLESS, "busy", id="busy"),
        # It holds the interpreter's lock, and ends when its processor time is spent.
        pytest.param(EQUAL, "busy", id="in one operation", marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_of_a_router_that_was_killed(source: str, what: str) -> None:
    command = [sys.executable, "-c", _ROUTER, source, what]
    router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert router.stdout is not None
    pid = int(router.stdout.readline())
    router.kill()
    router.wait()
    router.stdout.close()
    until_dead(pid)
