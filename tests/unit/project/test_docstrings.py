"""Docstrings begin with a sentence that has a subject and a verb.

A function's or module's begins with what it does ("Returns ..."), and a class's with that or with a sentence. In
tests, any sentence will do: what a test shows is best said of the thing that is tested ("A refused request ends"). The
check is a heuristic: it knows no grammar, only openings of fragments, plural nouns that look like verbs, and some
common verbs. `__init__` may name its parameters instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDERS = ("services", "client", "benchmarks", "scripts")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

FRAGMENT = re.compile(
    r"(What|Whatever|Who|Whom|Whose|Whether|Where|When|How|Of|All|Could|Beyond|As|At|By|One|Some|Someone|Something"
    r"|Same|Those|Both|Every|Everything|More|Two|Round|Against|Once|With)\b"
)
PLURAL_NOUNS = {
    *("Arrivals", "Connections", "Endpoints", "Engines", "Milliseconds", "Prompts", "Seconds", "Threads", "Tokens"),
    *("Weights", "Workers", "This", "Its"),
}
FINITE_VERB = re.compile(
    r"\b(is|are|was|were|has|have|had|can|cannot|could|may|must|would|needs|carries|got|went|kept|broke|ended|passed"
    r"|raised)\b"
)
TESTS_VERBS = {
    *("accepts", "agrees", "aborts", "adds", "adopts", "announces", "answers", "applies", "arrives", "asks", "becomes"),
    *("begins", "belongs", "binds", "brings", "builds", "cancels", "changes", "chooses", "closes", "comes", "computes"),
    *("connects", "contains", "copies", "costs", "decides", "depends", "did", "differs", "do", "does", "draws"),
    *("drives", "drops", "ends", "exists", "fails", "fetches", "finds", "finishes", "fits", "follows", "gets", "gives"),
    *("goes", "happens", "holds", "joins", "keeps", "knows", "learns", "leaves", "lets", "loads", "loses", "lose"),
    *("makes", "means", "might", "names", "pays", "prints", "raises", "reaches", "reads", "receives", "refuses"),
    *("registers", "rejects", "remains", "returns", "runs", "saves", "says", "sees", "sends", "serves", "shall"),
    *("should", "shows", "speaks", "starts", "stays", "stops", "takes", "tells", "tokenises", "tries", "uses"),
    *("waits", "wants", "will", "works", "writes", "yields", "become", "keep", "arrive", "belong", "follow"),
    *("differ", "replace", "lies", "matters", "insists", "travels", "take", "speak", "piles"),
    *(
        "answer",
        "ask",
        "count",
        "depend",
        "gains",
        "hold",
        "lives",
    ),
}
"""Finite verbs that are seldom nouns."""
RELATIVE_CLAUSE = re.compile(r"\b(that|which|who|whom|whose|where|when|while|if)\b")


def first_sentence(docstring: str) -> str | None:
    """Returns the sentence, up to its full stop or colon; None if the first paragraph has neither."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    found = re.match(r".+?[.:](?=\s|$)", paragraph)
    return found[0] if found else None


def begins_with_a_verb(sentence: str) -> bool:
    """Returns whether the first word may be a verb in the third person. "Traces of ..." begins with a noun."""
    found = re.match(r"([A-Z][a-z]*s)\b(?!['-]| of\b)", sentence)
    return found is not None and found[1] not in PLURAL_NOUNS


def says_something(sentence: str) -> bool:
    """Returns whether its main clause has a finite verb: one before any relative clause."""
    return FINITE_VERB.search(RELATIVE_CLAUSE.split(sentence)[0]) is not None


def says_anything(sentence: str) -> bool:
    """Returns whether it has more verbs than relative clauses, of the verbs that tests use."""
    words = re.findall(r"[a-z]+", sentence.lower())
    num_verbs = sum(word in TESTS_VERBS or FINITE_VERB.fullmatch(word) is not None for word in words)
    return num_verbs > len(RELATIVE_CLAUSE.findall(sentence)) + sum(word.startswith("what") for word in words)


def is_fragment(node: Documented, *, in_tests: bool = False) -> bool:
    docstring = ast.get_docstring(node)
    if docstring is None:
        return False
    sentence = first_sentence(docstring)
    if sentence is not None and in_tests and says_anything(sentence):
        return False
    if sentence is None or FRAGMENT.match(sentence):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "__init__":
        return not (sentence.startswith("`") or says_something(sentence) or begins_with_a_verb(sentence))
    whole = isinstance(node, ast.ClassDef) and says_something(sentence)
    return not (begins_with_a_verb(sentence) or whole)


def fragments(folder: Path, *, in_tests: bool = False) -> Iterator[str]:
    """Yields each docstring of the folder's code that begins with a fragment, after its place."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Documented) and is_fragment(node, in_tests=in_tests):
                line = getattr(node, "lineno", 1)
                yield f"{path.relative_to(folder.parent)}:{line}: {ast.get_docstring(node)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_sentence(folder: str) -> None:
    assert list(fragments(ROOT / folder)) == []


def test_docstrings_of_tests_begin_with_a_sentence() -> None:
    assert list(fragments(ROOT / "tests", in_tests=True)) == []


@pytest.mark.parametrize(
    "docstring",
    [
        "Of workers that take over from the same sources, together.",
        "One more is kept.",
        "Who could ever take the job over from there; without a source, run the whole of it.",
        "All that decides whom a job fits.",
        "Whether it is up.",
        "Seconds for all sequences.",
        "Traces of real workloads: when each request arrived.",
        "A worker's load, as its router knows it.",
        "The figures that are counted.",
        "Returns the number of rows",
    ],
)
def test_fragments_are_found(docstring: str) -> None:
    (node,) = ast.parse(f"class Example:\n    {docstring!r}").body
    assert isinstance(node, ast.ClassDef)
    assert is_fragment(node)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    'Returns the rows: all of them.'",
        "def __init__(self):\n    '`rows` are those of the table.'",
        "class Example:\n    'Keeps the rows.'",
        "class Full:\n    'The queue is full: the client may try again.'",
    ],
)
def test_sentences_are_not_fragments(source: str) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, Documented)
    assert not is_fragment(node)


@pytest.mark.parametrize(
    ("docstring", "is_sentence"),
    [
        ("A request that was refused leaves nothing behind.", True),
        ("What runs is finished there.", True),
        ("Returns what it was.", True),
        ("A request that was refused.", False),
        ("What a worker says.", False),
        ("The newest of each.", False),
    ],
)
def test_in_tests_a_sentence_has_a_verb_beside_those_of_its_clauses(docstring: str, is_sentence: bool) -> None:
    (node,) = ast.parse(f"def test():\n    {docstring!r}").body
    assert isinstance(node, ast.FunctionDef)
    assert is_fragment(node, in_tests=True) != is_sentence
