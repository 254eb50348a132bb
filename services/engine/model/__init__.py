"""Loads and checks a model, holds the memory of its KV, and runs its forward pass over a step's flat inputs.

`paged_model` runs the forward pass, `inputs` makes its inputs, and `kv_cache` holds the pool's memory. `weights`,
`servable`, `verification` and `fingerprint` are used at load, `gguf_conversion` before it.
Never: what a step runs, how attention is computed, or which token is sampled.
"""
