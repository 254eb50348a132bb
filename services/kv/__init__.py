"""Has the records of KV blocks at both ends of a handoff: which holder has a block, leases, imports and layouts.

Read in this order: `pool`, `layout`, `regions`, `countdown`, `lease`, `lease_table`, `slots` (the source's side) and
`handoff_admission` and `imports` (the destination's). Pure in every module: tables, rules and records, no I/O, no
clock, no thread.
`services.kvtransfer` moves the bytes; `services.engine` computes them.
"""
