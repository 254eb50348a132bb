"""Renders one model's chat template: the program `python -m services.router.text.template_child`.

The first question brings the template, each later one the messages of a chat (`template_process` asks them).
"""

from __future__ import annotations

import sys
from typing import Any

from services.core.confinement import serve
from services.core.errors import InvalidRequest
from services.router.text.chat_template import ChatTemplate

_MEMORY_BYTES = 512 << 20
_MOST_REFUSAL_CHARS = 400


class _Renderer:
    def __init__(self) -> None:
        self._template: ChatTemplate | None = None

    def answer(self, question: Any) -> Any:
        try:
            if self._template is None:
                self._template = ChatTemplate(question["source"], question["special_tokens"])
                return {}
            text = self._template.render(question["messages"], question["tools"], opens_answer=question["opens_answer"])
            num_bytes = len(text.encode())
        except InvalidRequest as error:
            return {"refusal": error.description[:_MOST_REFUSAL_CHARS]}
        except Exception as error:  # of a template that is not to be trusted: no text at all, or one that is none
            return {"refusal": f"{type(error).__name__}: {str(error)[:_MOST_REFUSAL_CHARS]}"}
        if num_bytes > question["most_bytes"]:
            return {"refusal": f"the model's chat template made {num_bytes} bytes of them"}
        return {"text": text}


def main() -> int:
    serve(_Renderer().answer, memory_bytes=_MEMORY_BYTES, processor_s=int(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
