"""Has what every worker needs, whatever its role: an engine, a block pool others may copy from, sessions with routers.

`host` puts the parts together; `transfer` has both ends of moving KV; `hub` brings step events to the event loop;
`session` serves the stream of one router; `registration` finds routers; `report` describes the worker, and `departure`
is how it leaves. `phase` is what a role means; the phases themselves are in `services.prefill` and `services.decode`.
"""
