"""Has the decode phase of a worker: it takes over a handoff's KV and runs the token loop.

`intake` reserves blocks or refuses, and imports the KV, `leg` follows each command from its arrival to its last token,
and `record` keeps the times for its spans and timings.
"""
