"""Uses `litellm`: a chat whole and as a stream, under a JSON Schema."""

# needs: litellm

import json
import sys

import litellm

url, model = sys.argv[1:]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
COMMON = {
    "model": f"openai/{model}",
    "api_base": url,
    "api_key": "none",
    "messages": [{"role": "user", "content": "A colour and a count, as JSON."}],
    "temperature": 0,
    "max_tokens": 120,
    "response_format": {"type": "json_schema", "json_schema": {"name": "Colour", "schema": SCHEMA, "strict": True}},
}
whole = litellm.completion(**COMMON).choices[0].message.content
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **COMMON))
assert streamed == whole
answer = json.loads(whole)
assert answer["colour"] in ("red", "green")
assert 0 <= answer["count"] <= 9
