"""Knows who may use the router and how much of it: tenants, their keys, their limits, and the file that says so."""
