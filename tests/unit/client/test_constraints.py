"""Tests that the helpers make constraints that the server's check accepts."""

from __future__ import annotations

import json

import pytest

import baton_client
from baton.v1 import types_pb2
from services.rpc.constraints import check_constraint

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}


@pytest.mark.parametrize(
    ("constraint", "kind"),
    [
        (baton_client.json_schema(SCHEMA), "json_schema"),
        (baton_client.json_schema(json.dumps(SCHEMA)), "json_schema"),
        (baton_client.json_schema(True), "json_schema"),
        (baton_client.json_object(), "json_object"),
        (baton_client.regex("[a-z]+"), "regex"),
        (baton_client.grammar('root ::= "a"'), "grammar"),
        (baton_client.choices("yes", "no"), "choices"),
    ],
)
def test_a_constraint_is_one_of_its_kind(constraint: types_pb2.Constraint, kind: str) -> None:
    check_constraint(constraint)
    assert constraint.WhichOneof("kind") == kind


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    properties = {name: {} for name in "zaby"}
    assert list(json.loads(baton_client.json_schema({"properties": properties}).json_schema)["properties"]) == [*"zaby"]
