"""Has the prefill phase of a worker: it runs a prompt, holds its KV under a lease, and samples one token.

`leg` follows each command from its arrival to the end of its lease.
"""
