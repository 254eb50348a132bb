"""Holds kernels in C for CPUs, in float32, bfloat16 and float16: their source, its build and their bindings.

They are optional: without a compiler at install time, or where a kernel disagrees with torch, torch's operators are
used. `services.engine.attention.native` and `services.engine.cpu` use the kernels.
"""
