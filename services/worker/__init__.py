"""What every worker has, whatever its role: an engine, a block pool others may copy from, sessions with routers.

`host` puts the parts together; `transfer` is both ends of moving KV; `hub` brings step events to the event loop;
`session` is the stream with one router; `registration` finds routers; `report` is what a worker says of itself, and
`departure` how it leaves. The phases themselves are in
`services.prefill` and `services.decode`.
"""
