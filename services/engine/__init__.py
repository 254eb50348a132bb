"""The engine: continuous batching over a paged KV pool.

Read in this order: `sequence` (what is served), `block_pool` (who holds which block), `scheduler` (what the next step
does): pure. Then `model`, `attention`, `sampler`, `runner` (the step on the device) and `engine` (its thread).
"""

from services.core.openmp import expect_shared_cores

expect_shared_cores()
