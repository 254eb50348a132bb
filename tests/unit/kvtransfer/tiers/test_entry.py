"""Tests that a label is believed only whole, and only for its own block."""

import hypothesis.strategies as st
from hypothesis import given

from services.kvtransfer.tiers.entry import LABEL_BYTES, Label, unpack_label
from tests.support.tiers import a_block, a_hash

KEY = bytes(range(16))


def test_a_label_fits_its_block() -> None:
    label = unpack_label(Label.of(KEY, a_hash(1), a_block(1), 7).pack())
    assert label is not None
    assert label.number == 7
    assert label.fits(KEY, a_hash(1), a_block(1))
    assert not label.fits(KEY, a_hash(2), a_block(1)), "another block's"
    assert not label.fits(bytes(16), a_hash(1), a_block(1)), "another layout's"
    assert not label.fits(KEY, a_hash(1), a_block(2)), "other bytes"
    assert not label.fits(KEY, a_hash(1), a_block(1)[:-1]), "fewer bytes"


@given(place=st.integers(0, LABEL_BYTES - 1), bit=st.integers(0, 7))
def test_a_label_with_a_changed_bit_is_none(place: int, bit: int) -> None:
    data = bytearray(Label.of(KEY, a_hash(1), a_block(1)).pack())
    data[place] ^= 1 << bit
    assert unpack_label(data) is None


@given(data=st.binary(max_size=2 * LABEL_BYTES))
def test_what_is_no_label_is_none(data: bytes) -> None:
    assert unpack_label(data) is None
