"""Has the model: loading and checking it, the memory of its KV, and its forward pass over a step's flat inputs.

`paged_model` is the forward pass, `inputs` what it takes, `kv_cache` the pool's memory. `weights`, `servable`,
`verification` and `fingerprint` are used at load, `gguf_conversion` before it.
Never: what a step runs, how attention is computed, or which token is sampled.
"""
