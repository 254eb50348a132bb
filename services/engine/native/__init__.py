"""Kernels in C for CPUs, and what takes the place of torch's operators with them.

Optional: without a compiler at install time, or where a kernel disagrees with torch, the plain path stays.
"""
