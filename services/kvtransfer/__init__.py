"""KV transfer: how a prompt's blocks get from the worker that computed them to the one that decodes.

Read in this order: `layout`, `countdown`, `lease`, `lease_table`, `slots` (the source's side) and `imports` (the
destination's): pure. Then the shells: `board` and `servicer` (source), `transports`, `fetch_stream` and `client`
(destination). The destination pulls; the protocol and its reasons are DESIGN §5 and `baton/v1/kvtransfer.proto`.
"""
