"""Has what every process uses for gRPC: serving, channels, errors on the wire, traces, metrics and logs. No torch."""
