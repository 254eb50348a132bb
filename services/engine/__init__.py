"""Runs a model with continuous batching over a paged KV pool.

Workers see `worker_engine`, with the records of `config` and of `schedule.sequence`. Behind it, `engine` is the thread
that schedules, runs and absorbs steps, `runner` is one step on the device, and `loading` puts the parts together.
The parts are folders; read `schedule` first (what a step runs), then `model`, `attention`, `sampling` and `cpu`.
Importing any of it changes nothing: what a process must set before torch is loaded is in `cpu.openmp`.
"""
