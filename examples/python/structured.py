"""Asks Baton for JSON that is valid under a schema, over gRPC, and reads it.

pip install ./client
python examples/python/structured.py "Paris has two million people and lies on the Seine."
"""

from __future__ import annotations

import argparse
import json
import sys

from baton.v1 import inference_pb2, types_pb2
from baton_client import CallFailed, Client, json_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["village", "town", "city"]},
        "millions": {"type": "integer", "minimum": 0, "maximum": 50},
    },
    "required": ["city", "kind", "millions"],
    "additionalProperties": False,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Reads a text into JSON.")
    parser.add_argument("text")
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT")
    args = parser.parse_args()
    # Nobody tells the model of the schema: the prompt has to say what is wanted.
    prompt = f"{args.text}\nSay as JSON which city this is: city, kind (village, town or city), millions of people."
    request = inference_pb2.GenerateRequest(constraint=json_schema(SCHEMA))
    request.messages.messages.add(role="user", content=prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = 400
    try:
        with Client(args.target) as client:
            response = client.generate(request, timeout_s=60)
    except CallFailed as error:
        print(error, file=sys.stderr)
        return 1
    if response.completion.finish_reason != types_pb2.FINISH_REASON_STOP:
        print("max_tokens cut the document off", file=sys.stderr)
        return 1
    print(json.loads(response.output.text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
