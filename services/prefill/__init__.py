"""The prefill phase of a worker: runs a prompt, holds its KV under a lease, samples one token.

`leg` is one command from arrival to the end of its lease; `servicer` is the session with a router.
"""
