"""Measures Baton's engine beside others on the same machine, in turns: `python -m benchmarks.peers --vllm
VENV/bin/python …`.

Ratios within one run are what counts: machines are shared and differ. A peer runs in an environment of its own, by a
program here that imports nothing of Baton's.
"""
