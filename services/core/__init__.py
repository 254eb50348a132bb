"""What every service shares: ids, errors, clock, hashing, configuration. Standard library only."""
