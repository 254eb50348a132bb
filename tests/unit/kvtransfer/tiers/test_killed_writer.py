"""Tests that a process that is killed while it writes to its disk tier leaves nothing that is taken for a block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S, Patience
from tests.support.tiers import blocks_of, content, hashes_of, loaded_disk, memory_of

pytestmark = pytest.mark.process

NUM_SLOTS = 8
NUM_BLOCKS = 40
WRITER = """
import sys
from pathlib import Path
from tests.support.tiers import blocks_of, hashes_of, loaded_disk

tier = loaded_disk(Path(sys.argv[1]), 8)
print(tier.num_held(hashes_of([0])), flush=True)
number = int(sys.argv[2])
while True:
    tier.write(hashes_of([number % 40]), blocks_of([number % 40]))
    number += 1
"""


def test_a_writer_that_is_killed_leaves_only_whole_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    memory = memory_of(1)
    num_found = 0
    for start in range(0, 30, 10):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(start)], stdout=subprocess.PIPE, env=dict(os.environ)
        )
        assert writer.stdout is not None
        assert writer.stdout.readline(), "it writes from now on"
        patience = Patience(HANG_S)
        while not path.exists() or path.stat().st_size < 2 * 12288:
            assert not patience.is_over(), "it writes nothing"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        tier = loaded_disk(path, NUM_SLOTS)  # the lock went with the process
        for number in range(NUM_BLOCKS):
            if tier.read(hashes_of([number]), memory, [0]):
                assert content(memory) == blocks_of([number])
                num_found += 1
        tier.close()
    memory.close()
    assert num_found > 0
