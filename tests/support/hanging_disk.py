"""Is a process that ends while its disk hangs in the midst of a read and of a write.

`python -m tests.support.hanging_disk FOLDER` says `closed` when all is closed that can be.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.support.tier_pool import NUM_BLOCKS, Pool
from tests.support.tiers import blocks_of, hashes_of
from tests.support.workers import until


async def main(folder: Path) -> None:
    pool = Pool(folder)
    await until(lambda: not pool.disk._loading, "the file has been read")
    pool.disk.write(hashes_of([100]), blocks_of([100]))
    pool.file.told.clear()
    pool.file.answering.clear()
    pool.file.taking.clear()
    reading = asyncio.create_task(pool.tiers.read(hashes_of([100]), pool.memory, [0]))
    pool.cache(*range(NUM_BLOCKS))
    pool.tiers.demoter.stepped()
    await asyncio.to_thread(pool.file.asked.wait, 20)
    await asyncio.to_thread(pool.file.told.wait, 20)
    reading.cancel()
    await pool.tiers.close()
    pool.engine.close()
    print("closed", flush=True)


asyncio.run(main(Path(sys.argv[1])))
