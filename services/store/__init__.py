"""Keeps KV for others in host memory, in a process of its own: `baton kvtransfer`.

A store is a worker whose engine computes nothing. Sessions, leases, imports, transfers, draining and metrics are those
of `services.worker`. Never: torch.
"""
