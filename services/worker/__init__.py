"""What every worker has, whatever its role: an engine, a block pool others may copy from, sessions with routers.

`host` puts the parts together; `hub` brings step events to the event loop; `session` is the stream with one router;
`legs` hands commands to the right session; `registration` finds routers. The phases themselves are in
`services.prefill` and `services.decode`.
"""
