"""Has the decode phase of a worker: it takes over a handoff's KV and runs the token loop.

`admission` decides (pure), `intake` reserves blocks and brings the KV in, `leg` follows each command from its arrival
to its last token, `record` keeps what its spans and timings say.
"""
