"""Tests what keeps a library of kernels out of a wheel whose tag promises an old glibc and nothing else."""

from __future__ import annotations

import pytest

from scripts.wheels import why_not_portable


@pytest.mark.parametrize(
    ("strings", "reason"),
    [
        ((b"libc.so.6", b"GLIBC_2.2.5", b"GLIBC_2.17"), ""),
        ((b"libm.so.6", b"GLIBC_2.28"), ""),
        ((b"libc.so.6", b"GLIBC_2.9", b"GLIBC_2.34", b"GLIBC_2.4"), "glibc 2.34"),
        ((b"libgomp.so.1", b"libc.so.6", b"GLIBC_2.17"), "libgomp.so.1"),
        ((b"libstdc++.so.6", b"libc.so.6", b"GLIBC_3.0"), "glibc 3.0, libstdc++.so.6"),
    ],
)
def test_what_a_library_asks_for_beyond_the_tag_is_named(strings: tuple[bytes, ...], reason: str) -> None:
    table = b"\x7fELF\1\2\0" + b"\0".join(strings) + b"\0memcpy\0"
    assert why_not_portable(table, oldest="2.28") == reason
