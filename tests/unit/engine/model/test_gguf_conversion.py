"""Tests that a GGUF file that was not fetched as a whole is refused, with the reason, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from services.core.errors import UnsupportedModel
from services.engine.model.gguf_conversion import convert_gguf


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    writer = GGUFWriter(tmp_path / "whole.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b", "é"])
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.ones((3, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.004, 0.02, 0.1, 0.25, 0.4, 0.6, 0.9])
def test_a_file_that_ends_too_early_is_refused(whole: bytes, share: float, tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UnsupportedModel, match=r"part\.gguf is damaged or incomplete, fetch it again: \S"):
        convert_gguf(path, tmp_path / "out" / "model")
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\3\4" + bytes(99))
    with pytest.raises(UnsupportedModel, match="damaged or incomplete"):
        convert_gguf(path, tmp_path / "out" / "model")
