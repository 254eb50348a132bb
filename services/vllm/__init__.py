"""Has vLLM compute behind a worker (ADR 0028): `engine` is the `WorkerEngine`, `inside` is what runs in vLLM's own
environment, which `environment` finds, and the modules between connect the two.

Never: an import of vLLM in the worker's process.
"""
