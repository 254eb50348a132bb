"""Has what is peculiar to computing on a CPU and to the host's memory. Nothing here is needed for a right answer.

`quantisation` keeps weights in 8 or 4 bits where that is asked for, by `quantised_linear`. `fast_paths` replaces a
model's parts by faster ones: `packed_linear`, `native_modules`, `decoder_layer`. `openmp` and `host_memory` set up a
process, `pinning` serves copies to and from a GPU, and `dtype_timing` is the program behind `--dtype auto`. The kernels
in C are in `services.engine.native`.
"""
