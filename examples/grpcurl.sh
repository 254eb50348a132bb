#!/bin/sh
# Baton from the shell. It describes itself (reflection), so grpcurl needs no protos.
#   ./grpcurl.sh [HOST:PORT]
set -eu
TARGET=${1:-127.0.0.1:50051}

# What is there.
grpcurl -plaintext "$TARGET" list
grpcurl -plaintext "$TARGET" describe baton.v1.InferenceService
grpcurl -plaintext "$TARGET" describe baton.v1.GenerateRequest

# Does it serve?
grpcurl -plaintext -d '{"service": "baton.v1.InferenceService"}' "$TARGET" grpc.health.v1.Health/Check
grpcurl -plaintext "$TARGET" baton.v1.InferenceService/ListModels

# One answer, whole.
grpcurl -plaintext -d '{"text": "The sea is", "stopping": {"max_tokens": 8}}' \
    "$TARGET" baton.v1.InferenceService/Generate

# A chat, streamed; with a deadline of 30 s.
grpcurl -plaintext -max-time 30 -d '{
    "messages": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    "sampling": {"temperature": 0.7, "top_p": 0.95, "seed": 1},
    "stopping": {"max_tokens": 8}
}' "$TARGET" baton.v1.InferenceService/GenerateStream

# Tokens in, the likeliest alternatives out; the spans continue the trace of this caller.
grpcurl -plaintext -H 'traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01' -d '{
    "token_ids": {"ids": [5, 6, 7]},
    "response": {"logprobs": 2},
    "stopping": {"max_tokens": 2, "ignore_eos": true}
}' "$TARGET" baton.v1.InferenceService/Generate
