"""Tests that a confined process which somebody ends, or which the host does not run, is not the fault of what it was
asked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.core.confined_process import ConfinedLoss, ConfinedProcess
from services.core.errors import InvalidRequest, Overloaded
from services.router.text.template_process import TemplateProcess
from services.worker import grammar_process
from services.worker.grammar_process import GrammarCompiler
from tests.support.patience import HANG_S, Patience
from tests.support.text_model import byte_tokenizer, write_model

pytestmark = pytest.mark.process

CHILD = "services.router.text.template_child"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_is_ended_from_outside_is_lost(number: signal.Signals) -> None:
    process = ConfinedProcess(CHILD, "60")
    os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as aside:
        asked = aside.submit(process.ask, {}, within_s=60.0, most_bytes=100)
        os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGCONT)
        with pytest.raises(ConfinedLoss, match=f"ended by signal {number.value}"):
            asked.result()


def test_one_that_does_not_run_is_lost() -> None:
    process = ConfinedProcess(CHILD, "60")
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ConfinedLoss, match="took more than"):
        process.ask({}, within_s=0.5, most_bytes=100)
    assert process.has_ended


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[GrammarCompiler]:
    write_model(tmp_path)
    compiler = GrammarCompiler(tmp_path, byte_tokenizer().get_vocab_size(), [2])
    compiler.load()
    yield compiler
    compiler.interrupt()
    compiler.close()


def test_a_constraint_is_vetted_by_another(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile("regex", "[a-z]+")
    assert compiler._child.pid is not None
    os.kill(compiler._child.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "_VET_S", 2.0)
        assert compiler.compile("regex", "[0-9]+").num_bytes > 0


def test_a_constraint_whose_processes_are_all_lost_is_refused_for_now(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise ConfinedLoss("was ended by signal 9")

    compiler.compile("regex", "[a-z]+")
    monkeypatch.setattr(ConfinedProcess, "ask", lost)
    with pytest.raises(Overloaded, match="ended by signal 9"):
        compiler.compile("regex", "[0-9]+")


def test_a_chat_whose_process_is_lost_is_refused_for_now() -> None:
    template = TemplateProcess(ENDLESS, {}, within_s=60.0)
    with ThreadPoolExecutor(1) as aside:
        rendered = aside.submit(template.render, [])
        patience = Patience(HANG_S)
        while template.pid is None:
            assert not patience.is_over()
        os.kill(template.pid, signal.SIGKILL)
        with pytest.raises(Overloaded, match="ended by signal 9"):
            rendered.result()
    template.close()
    with pytest.raises(InvalidRequest, match="no longer"):
        template.render([])
