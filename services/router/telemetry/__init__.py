"""Has what a router tells of itself: metrics, spans, objectives and the activity line."""
