"""Keeps blocks that left the pool: in host memory, in a file, or in a service of others.

Read in this order: `tier` (what a tier is), `entry` (how a block is labelled, so that none is taken for another),
`host`, `slot_file` and `disk`, and `stack` (several tiers as one, and what happens when one fails). No torch, no gRPC.
"""
