"""gRPC as every process uses it (serving, channels, errors on the wire), traces, metrics and logs. No torch."""
