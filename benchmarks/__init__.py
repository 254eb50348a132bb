"""What Baton measures of itself: `make bench`. Figures, never pass or fail; targets stand beside them."""
