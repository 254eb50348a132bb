"""Runs a model with continuous batching (Orca, OSDI 2022) over a paged KV pool (PagedAttention, arXiv 2309.06180).

Workers use `worker_engine`, with the records of `config` and of `schedule.sequence`. Behind it, `engine` has the thread
that schedules, runs and absorbs steps, `runner` runs one step on the device, and `loading` loads a model and makes an
engine of it. Read the folder `schedule` first (what a step runs), then `model`, `attention`, `sampling` and `cpu`.
Importing the package sets nothing in the process: what must be set before torch is loaded is in `cpu.openmp`.
"""
