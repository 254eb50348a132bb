"""The process that vets constraints reads the worker's vocabulary, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.errors import InvalidRequest, UnsupportedModel
from services.worker.grammar_process import GrammarCompiler
from tests.support.text_model import byte_tokenizer, write_model

pytestmark = pytest.mark.process


def test_a_vocabulary_that_has_changed_is_told_of_the_model(tmp_path: Path) -> None:
    content = (write_model(tmp_path) / "tokenizer.json").read_text()
    compiler = GrammarCompiler(tmp_path, byte_tokenizer().get_vocab_size(), [2])
    compiler.load()
    try:
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(UnsupportedModel, match="did not start"):
            compiler.compile("regex", "[a-z]+")
        (tmp_path / "tokenizer.json").write_text(content)
        assert compiler.compile("regex", "[a-z]+").num_bytes > 0
        with pytest.raises(InvalidRequest, match="cannot be"):
            compiler.compile("regex", "(")
    finally:
        compiler.interrupt()
        compiler.close()
