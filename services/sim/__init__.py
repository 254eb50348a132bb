"""Has the cluster in virtual time: the router's own coordinator and policy over workers that are cost models.

It answers how fast, how many and how much. Faults and their handling are the business of `tests/sim`, which runs real
workers.
"""
