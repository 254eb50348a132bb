"""Runs in vLLM's own environment, in vLLM's own processes. Nothing of the worker imports it."""
