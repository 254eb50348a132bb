"""Uses `openai`: a chat's answer and its stream under a JSON Schema, and `parse` with pydantic, whole and streamed."""

# needs: openai, pydantic

import json
import sys
from typing import Literal

from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]
client = OpenAI(base_url=url, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "Which city is it? Answer in JSON with kind, code and size."}]
COMMON = {"model": model, "messages": MESSAGES, "max_tokens": 200, "temperature": 0, "seed": 1}


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["town", "city"]
    code: str = Field(pattern="^[A-Z]{3}$")
    size: int = Field(ge=0, le=99)


parsed = client.chat.completions.parse(response_format=City, **COMMON).choices[0]
assert parsed.finish_reason == "stop"
assert isinstance(parsed.message.parsed, City)

schema = {"name": "City", "schema": City.model_json_schema(), "strict": True}
chunks = client.chat.completions.create(
    response_format={"type": "json_schema", "json_schema": schema}, stream=True, **COMMON
)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
City.model_validate_json(text)

with client.chat.completions.stream(response_format=City, **COMMON) as stream:
    for _ in stream:
        pass
    assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed

free = client.chat.completions.create(response_format={"type": "json_object"}, **COMMON).choices[0]
assert free.finish_reason == "length" or isinstance(json.loads(free.message.content or ""), dict)

choice = client.chat.completions.create(extra_body={"guided_choice": ["red", "green"]}, **COMMON).choices[0]
assert choice.message.content in ("red", "green")

refused = None
try:
    schema = {"name": "n", "schema": {"not": {}}}
    client.chat.completions.create(response_format={"type": "json_schema", "json_schema": schema}, **COMMON)
except BadRequestError as error:
    refused = error.param
assert refused == "response_format.json_schema.schema", refused
