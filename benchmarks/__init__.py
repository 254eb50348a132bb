"""Measures Baton itself: `make bench` runs it. It gives figures, never pass or fail; targets stand beside them."""

from services.engine.cpu.openmp import expect_own_cores

expect_own_cores()
