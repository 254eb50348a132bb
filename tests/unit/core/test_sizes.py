"""Tests the reading of amounts of memory."""

import pytest

from services.core.sizes import MOST_BYTES, is_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1kb", 1000), ("1000000", 1_000_000), (" 2TiB ", 2 << 40), ("0", 0)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 XiB", "-1", "1.5GiB", "1e9", "٣GiB", f"{MOST_BYTES + 1}", "999999999TiB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)
    assert not is_size(text)


def test_nothing_is_no_size_of_a_pool() -> None:
    assert not is_size("0")
