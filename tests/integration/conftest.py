"""Says which of these tests run beside no other, and which are left to `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ALONE = (
    "answers/test_default_model.py",
    "answers/test_dtype_auto.py",
    "answers/test_many_streams.py",
    "answers/test_router_streams.py",
    "cli/test_lifecycle.py",
    "cli/test_supervisor.py",
    "cli/test_up.py",
    "cli/test_up_leaves_nothing.py",
    "endings/test_deadlines.py",
    "endings/test_health.py",
    "endings/test_one_name.py",
    "endings/test_pauses.py",
    "endings/test_soak.py",
    "faults/",
    "strangers/test_bad_peers.py",
    "strangers/test_capture.py",
    "strangers/test_idle_peers.py",
    "strangers/test_long_texts.py",
    "strangers/test_memory_of_refused.py",
    "strangers/test_memory_of_waiting.py",
    "traces/test_at_a_collector.py",
    "traces/test_no_collector.py",
    "traces/test_one_trace.py",
)
"""They measure time or memory, kill processes, or need both processors."""
LONG = (
    "answers/test_dtype_auto.py",
    "answers/test_many_streams.py",
    "cli/test_up_leaves_nothing.py",
    "endings/test_pauses.py",
    "endings/test_soak.py",
    "faults/",
    "strangers/test_long_texts.py",
    "strangers/test_memory_of_refused.py",
    "strangers/test_memory_of_waiting.py",
    "traces/test_at_a_collector.py",
    "traces/test_no_collector.py",
)
"""They start real processes of all kinds again and again, or go on for minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This hook sees the items of the whole run."""
    for name in (*ALONE, *LONG):
        assert (HERE / name).exists(), f"{name} is gone"
    for item in items:
        if HERE not in item.path.parents:
            continue
        path = item.path.relative_to(HERE).as_posix()
        if path.startswith(ALONE):
            item.add_marker(pytest.mark.alone)
        if path.startswith(LONG):
            item.add_marker(pytest.mark.long)
