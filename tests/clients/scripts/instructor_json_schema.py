"""Uses `instructor`: a pydantic model by JSON Schema, whole and as a stream of partial ones."""

# needs: instructor, openai

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]


class Review(BaseModel):
    verdict: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
asked = {
    "model": model,
    "response_model": Review,
    "messages": [{"role": "user", "content": "It was a fine film. Review it."}],
    "max_tokens": 120,
    "temperature": 0,
    "max_retries": 0,
}
review = client.chat.completions.create(**asked)
assert isinstance(review, Review)
*_, last = client.chat.completions.create_partial(**asked)
assert last.model_dump() == review.model_dump()
