"""What Baton measures of itself: `make bench`. Figures, never pass or fail; targets stand beside them."""

from services.core.openmp import expect_own_cores

expect_own_cores()
