"""KV blocks as both ends of a handoff see them: who holds which block, what is promised to whom, and where it lies.

Read in this order: `pool`, `layout`, `regions`, `countdown`, `lease`, `lease_table`, `slots` (the source's side) and
`imports` (the destination's). Pure, every module of it: tables and records, no I/O, no clock, no thread. What moves
bytes is `services.kvtransfer`; what computes them is `services.engine`.
"""
