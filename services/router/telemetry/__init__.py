"""Has what a router tells of itself: metrics, spans, objectives, and what is remembered of requests."""
