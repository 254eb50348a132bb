"""Asks /v1/responses with OpenAI's package: whole, as a stream, and held to a pydantic model."""

# needs: openai, pydantic

from __future__ import annotations

import sys
from typing import Literal

import pydantic
from openai import OpenAI


class Answer(pydantic.BaseModel):
    sure: bool
    kind: Literal["block", "lease"]


def main(address: str, model: str) -> None:
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        whole = client.responses.create(model=model, input="What is a lease?", temperature=0, max_output_tokens=8)
        assert whole.output_text
        with client.responses.create(
            model=model, input="What is a lease?", temperature=0, max_output_tokens=8, stream=True
        ) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == whole.output_text
        parsed = client.responses.parse(model=model, input="What is a lease?", text_format=Answer, temperature=0)
        assert isinstance(parsed.output_parsed, Answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
