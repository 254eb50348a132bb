"""Makes computing on a CPU and copies of host memory faster. Results do not depend on it, except for roundings.

`quantisation` keeps weights in 8 or 4 bits where that is asked for, by `quantised_linear`. `fast_paths` replaces a
model's parts by faster ones: `native_modules`, `decoder_layer`, `packed_linear`, of which `linear_plan` chooses, and
`native_layers`, which joins what these have made of the layers.
`openmp` and `host_memory` set up a process, and `pinning` locks pages for copies to and from a GPU. The kernels in C
are in `services.engine.native`.
"""
