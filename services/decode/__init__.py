"""The decode phase of a worker: takes over a handoff's KV and runs the token loop.

`admission` decides (pure), `intake` reserves blocks and brings the KV in, `leg` is one command from arrival to its last
token, `servicer` is the session with a router.
"""
