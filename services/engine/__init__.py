"""The engine: continuous batching over a paged KV pool.

Read in this order: `sequence` (what is served), `block_pool` (who holds which block), `scheduler` (what the next step
does): pure. Then `model`, `attention`, `sampler`, `runner` (the step on the device) and `engine` (its thread).
"""

import os

# Read by the OpenMP runtime when torch loads it. Its own default spins for milliseconds at the end of every parallel
# region: nothing is faster on cores of one's own, and where others want them too, steps take thirty times longer
# (2 workers with 2 threads each on 2 cores: 1350 ms a step; so: 50; with a core each: 40).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "500")
