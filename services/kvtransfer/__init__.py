"""Moves a prompt's blocks from the worker that computed them to the one that decodes.

The rules are in `services.kv`; this package moves the bytes by them. Read in this order: `board` and `servicer`
(source), `transports`, `fetch_stream` and `client` (destination). The destination pulls. The protocol is in
`baton/v1/kvtransfer.proto`, its reasons are in docs/architecture.md, "What keeps the handoff right".
"""
