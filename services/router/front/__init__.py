"""Has the fronts of a router, gRPC and HTTP, and what they share: calls on their way in."""
