"""Has the fronts of a router, gRPC, HTTP and the operators', and what the first two share: calls on their way in."""
