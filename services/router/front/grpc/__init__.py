"""Has the gRPC front: the public API as `baton.v1.InferenceService`."""
