"""Holds what every service shares: ids, errors, clock, hashing, configuration. It uses the standard library only."""
