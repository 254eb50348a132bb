"""Has attention over the paged pool.

`paged` defines it: its signature, with the `StepLayout` that all layers of a step share, a plain reference, and the
check of a backend against it. The backends are `dense` (any device), `varlen` (CUDA) and `native` (CPUs);
`choice` takes the fastest that passes the check.
"""
