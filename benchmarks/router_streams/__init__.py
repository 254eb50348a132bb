"""Measures what a router's streams cost it: thousands open at once over workers without an engine, on each front.

The router under test is a process, all workers are one (`workers.py`), and the client is one (`client.py`), which reads
raw bytes. `measure.py` runs them and takes the figures. On a machine with two cores they share these.
"""
