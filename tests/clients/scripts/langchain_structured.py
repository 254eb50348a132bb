"""Uses `langchain-openai`: a chat model with structured output, and plainly as a stream."""

# needs: langchain_openai

import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, name = sys.argv[1:]


class Weather(BaseModel):
    sky: Literal["clear", "cloudy"]
    celsius: int = Field(ge=-50, le=60)


model = ChatOpenAI(base_url=url, api_key="none", model=name, temperature=0, max_tokens=120, max_retries=0)
weather = model.with_structured_output(Weather, method="json_schema").invoke("What is the weather like? In JSON.")
assert isinstance(weather, Weather)
text = "".join(str(chunk.content) for chunk in model.stream("Say something.", stop=["\n\n"]))
assert text
