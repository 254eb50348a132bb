"""Runs the simulator: `python -m tests.sim --seeds 2000 [--start N] [--jobs 2]`, or `--seed N --trace` to see one seed.

With `--resume FILE` what is done is written down there, and the same command goes on where it was stopped, however it
was.

Read in this order: `world`, `loop` and `node` (virtual time, processes), `network`, `rpc_client` and `rpc_server` (what
grpc.aio offers), `model`, `memory`, `engine` and `shared_memory` (KV that remembers where it came from), `worker`,
`router`, `client` and `cluster` (the real code on all that), `scenario`, `strikes`, `faults` and `record` (what is
asked and what goes wrong), `invariants`, `clocks`, `turns` and `outcomes` (what must hold), `simulation` (one run),
`campaign` (many), `mutation` and the mutants (it bites).
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import traceback
from pathlib import Path

from tests.sim import campaign
from tests.sim.simulation import simulate

_RESULT_FROM_SEEDS = 10_000
"""So many are worth a file among the results."""


def main() -> int:
    options = _options()
    if options.seed is not None:
        return _one(options.seed, trace=options.trace)
    seeds = range(options.start, options.start + options.seeds)
    progress = None
    if options.resume is not None:
        try:
            progress = campaign.Progress(options.resume, may_mix=options.mix_trees)
        except campaign.MixedTrees as error:
            print(error, file=sys.stderr)
            return 2
    summary = campaign.run(seeds, options.jobs, progress, chunk_seeds=options.chunk_seeds, tell=_tell)
    print(summary)
    if summary.failures:
        print(f"failed: {', '.join(summary.failures)}")
    if progress is not None and (options.result is not None or len(seeds) >= _RESULT_FROM_SEEDS):
        result = options.result or Path(f"benchmarks/results/sim-{datetime.date.today().isoformat()}.json")
        campaign.write_result(result, summary, seeds, options.jobs, progress)
        print(f"result: {result}")
    return 1 if summary.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Simulates the cluster under faults.")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--chunk-seeds", type=int, default=50, help="so many at once are done or not")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="write down what is done, and go on from there")
    parser.add_argument("--mix-trees", action="store_true", help="go on although another tree wrote the file")
    parser.add_argument("--result", type=Path, metavar="FILE", help="where the result goes, once all is done")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    return parser.parse_args()


def _tell(line: str) -> None:
    print(line, flush=True)


def _one(seed: int, *, trace: bool) -> int:
    try:
        print(simulate(seed, on_note=print if trace else None))
    except Exception as error:
        traceback.print_exception(error)
        print(f"\nseed {seed} failed: {error!r}\nreplay: {campaign.replay_command(seed)}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
