"""`python -m tests.sim --seeds 2000 [--start N]`, or `--seed N --trace` to see one.

Read in this order: `world`, `loop` and `node` (virtual time, processes), `network`, `rpc_client` and `rpc_server` (what
grpc.aio offers), `model`, `memory`, `engine` and `shared_memory` (KV that remembers where it came from), `worker`,
`router`, `client` and `cluster` (the real code on all that), `scenario`, `faults` and `invariants`, `simulation` (one
run), `mutation` and the mutants (it bites).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.sim.simulation import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Simulates the cluster under faults.")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args()
    seeds = range(options.start, options.start + options.seeds) if options.seed is None else [options.seed]
    started_s, outcomes, turns, failed = time.perf_counter(), Counter[str](), 0, []
    for seed in seeds:
        try:
            result = simulate(seed, on_note=print if options.trace else None)
        except Exception as error:
            failed.append(seed)
            traceback.print_exception(error)
            print(f"\nseed {seed} failed: {error!r}\nreplay: {replay_command(seed)}", flush=True)
            if not options.keep_going:
                break
            continue
        outcomes.update(result.outcomes)
        turns += result.num_turns
        if options.seed is not None:
            print(result)
    spent_s = time.perf_counter() - started_s
    print(f"{len(seeds)} seeds, {len(failed)} failed, {turns} turns, {spent_s:.1f} s; outcomes: {dict(outcomes)}")
    if failed:
        print(f"failed: {failed}")
    return 1 if failed else 0


def replay_command(seed: int) -> str:
    return f"python -m tests.sim --seed {seed} --trace"


if __name__ == "__main__":
    sys.exit(main())
