"""Is a package, so that pytest ends what is shared by all of it before other tests begin."""
