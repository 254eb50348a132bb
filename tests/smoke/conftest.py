"""Says which failed smokes `make test` may try once more: those that a busy machine can be the reason of."""

from __future__ import annotations

import pytest

from tests.support.footprint import children_left
from tests.support.patience import Wrong

_NEVER_AGAIN = 70
"""An exit status of pytest's that is not its 1, which stands for failed tests."""


def pytest_exception_interact(node: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None and call.excinfo.errisinstance(Wrong):
        node.session.stash[_wrong] = True


_wrong = pytest.StashKey[bool]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.stash.get(_wrong, False) or children_left():
        session.exitstatus = _NEVER_AGAIN
