"""Takes whole outputs of one request apart, as its form says: first what is thought, then calls of tools. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from services.router.text.output.calls import CallParser
from services.router.text.output.families import NONE, REASONING_TAGS, ToolFamily
from services.router.text.output.parts import CallPart, Parsed
from services.router.text.output.reasoning import ReasoningParser
from services.router.text.output.tags import MARKS, without_marks


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Says what is looked for in the outputs of one request. By default nothing is, and all of an output is text."""

    reasoning: str = NONE
    """The form in which the model thinks."""
    is_thinking: bool = False
    """Whether the prompt ends within the part that is thought."""
    tools: ToolFamily | None = None
    names: Collection[str] = field(default=frozenset())
    """The functions that may be called."""
    only_one_call: bool = False
    only_calls: bool = False
    """Whether the output is held to calls, so that nothing in it but what is thought is text."""

    @property
    def is_plain(self) -> bool:
        return self.reasoning == NONE and self.tools is None

    def marks(self, special_ids: Mapping[str, int]) -> dict[int, str]:
        """Returns the marks of the tags that are looked for, by the ids of special tokens that they are."""
        tags = (*REASONING_TAGS.get(self.reasoning, ()), *(self.tools.tags if self.tools is not None else ()))
        return {special_ids[tag]: MARKS[tag] for tag in tags if tag in special_ids}


PLAIN = OutputForm()


class OutputParser:
    """Parses one output. Give it each piece in order, then `flush`."""

    def __init__(self, form: OutputForm, random_hex: Callable[[int], str]) -> None:
        """`random_hex` draws a number of hexadecimal digits, for the ids of calls."""
        self._reasoning = None if form.reasoning == NONE else ReasoningParser(opened=form.is_thinking)
        self._calls: CallParser | None = None
        if (family := form.tools) is not None:
            self._calls = family.parser(
                form.names,
                lambda: family.call_id(random_hex),
                only_one=form.only_one_call,
                only_calls=form.only_calls,
            )

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_thinking(self) -> bool:
        """Returns whether what comes next is thought, as far as is known."""
        return self._reasoning is not None and self._reasoning.is_thinking

    @property
    def has_enough(self) -> bool:
        """Returns whether the output may end here: it has the one call that is wanted."""
        return self._calls is not None and self._calls.has_enough

    def push(self, text: str) -> Parsed:
        """Returns what this piece adds. Marks are left out."""
        thought, rest = ("", text) if self._reasoning is None else self._reasoning.push(text)
        parsed = Parsed(text=rest) if self._calls is None else self._calls.push(rest)
        return _finished(thought, parsed)

    def flush(self) -> Parsed:
        """Returns what was held back, when the output has ended."""
        thought, rest = ("", "") if self._reasoning is None else self._reasoning.flush()
        parsed = Parsed(text=rest)
        if self._calls is not None:
            parsed = Parsed.of([self._calls.push(rest), self._calls.flush()])
        return _finished(thought, parsed)


def _finished(thought: str, parsed: Parsed) -> Parsed:
    calls = tuple(CallPart(part.index, part.call_id, part.name, without_marks(part.arguments)) for part in parsed.calls)
    return Parsed(without_marks(thought), without_marks(parsed.text), calls)
