"""The CRD, the operator's types and the documents say the same about BatchJobs."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import pytest
import yaml

from rowlock_operator import model, resources, status
from rowlock_operator.conditions import Condition, Type
from rowlock_operator.model import (
    Backoff,
    Execution,
    FailedPartition,
    Master,
    Observed,
    Options,
    Spec,
)

ROOT = Path(__file__).parents[2]
CRD_DIR = ROOT / "manifests" / "crd"

Schema = dict[str, Any]

CRD: Schema = yaml.safe_load((CRD_DIR / "crd.yaml").read_text())
(VERSION,) = CRD["spec"]["versions"]
SCHEMA: Schema = VERSION["schema"]["openAPIV3Schema"]
SPEC: Schema = SCHEMA["properties"]["spec"]
STATUS: Schema = SCHEMA["properties"]["status"]

# Where the operator's types are flatter than the object that people write, or shorter.
NAMES = {
    "ttlSecondsAfterFinished": "ttl_seconds",
    "serviceAccountName": "service_account",
}
IMMUTABLE = {"job", "parameters", "instanceKey", "pool", "delivery", "master"}


def snake(name: str) -> str:
    return NAMES.get(name) or re.sub(r"[A-Z]", lambda big: f"_{big[0].lower()}", name)


# What each dataclass holds of the schema, by the names in the CRD.
HELD: list[tuple[type, Schema]] = [
    (
        Spec,
        {
            **SPEC["properties"],
            **SPEC["properties"]["partitions"]["properties"],
        },
    ),
    (Backoff, SPEC["properties"]["partitions"]["properties"]["backoff"]["properties"]),
    (Master, SPEC["properties"]["master"]["properties"]),
]
FIELDS = [
    pytest.param(holder, name, schema, id=f"{holder.__name__}.{name}")
    for holder, held in HELD
    for name, schema in held.items()
    if name != "partitions"
]


def test_the_names_of_the_kind() -> None:
    names = CRD["spec"]["names"]
    assert CRD["spec"]["group"] == model.GROUP
    assert (names["plural"], names["kind"]) == (model.PLURAL, model.KIND)
    assert CRD["metadata"]["name"] == f"{model.PLURAL}.{model.GROUP}"
    assert VERSION["name"] == model.VERSION


@pytest.mark.parametrize("holder,held", HELD, ids=lambda one: getattr(one, "__name__", ""))
def test_no_field_is_on_one_side_only(holder: type, held: Schema) -> None:
    here = {one.name for one in fields(holder)}
    assert here == {snake(name) for name in held if name != "partitions"}


@pytest.mark.parametrize("holder,name,schema", FIELDS)
def test_a_field_has_the_same_type(holder: type, name: str, schema: Schema) -> None:
    hint = get_type_hints(holder)[snake(name)]
    assert kinds(schema) == python_kinds(hint)


def kinds(schema: Schema) -> set[str]:
    """JSON types that the API server lets through."""
    if "anyOf" in schema:
        return {one["type"] for one in schema["anyOf"]}
    return {schema["type"]}


def python_kinds(hint: Any) -> set[str]:
    """JSON types that a Python type stands for; None stands for an absent field."""
    if get_origin(hint) in (Union, types.UnionType):
        return {kind for one in get_args(hint) for kind in python_kinds(one)}
    if hint is type(None):
        return set()
    if (
        get_origin(hint) is Literal
        or hint is str
        or (isinstance(hint, type) and issubclass(hint, StrEnum))
    ):
        return {"string"}
    if hint is bool:
        return {"boolean"}
    # Whole seconds in the CRD are seconds in the database, which are doubles.
    if hint in (int, float):
        return {"integer"}
    assert hint in (Backoff, Master) or get_origin(hint) is not None or hint is Mapping
    return {"object"}


@pytest.mark.parametrize("holder,name,schema", FIELDS)
def test_a_field_has_the_same_default(holder: type, name: str, schema: Schema) -> None:
    (field,) = (one for one in fields(holder) if one.name == snake(name))
    default = default_of(field)
    if name == "job":
        assert default is MISSING
    elif name == "mode":
        assert (default, "default" in schema) == (model.Mode.JOB, False)
    elif schema.get("type") == "object" and name in ("backoff", "master"):
        assert "default" not in schema
    else:
        assert schema.get("default") == default


def default_of(field: Field[Any]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def test_words_are_the_same() -> None:
    properties = SPEC["properties"]
    assert properties["deletionPolicy"]["enum"] == list(model.DeletionPolicy)
    assert properties["master"]["properties"]["mode"]["enum"] == list(model.Mode)
    delivery = properties["partitions"]["properties"]["delivery"]["enum"]
    hint = get_type_hints(Spec)["delivery"]
    stored = {word for one in get_args(hint) for word in get_args(one)}
    assert {snake(word).lstrip("_").upper() for word in delivery} == stored


def messages(schema: Schema) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        yield rule["message"]
    for field in schema.get("properties", {}).values():
        yield from messages(field)


def test_what_is_immutable_is_said_in_the_rules_and_to_people() -> None:
    ruled = {
        found[1].split(".")[-1]
        for message in messages(SPEC)
        if (found := re.match(r"spec\.([\w.]+) is immutable", message))
    }
    described = {
        name
        for properties in (SPEC["properties"], SPEC["properties"]["partitions"]["properties"])
        for name, field in properties.items()
        if field["description"].endswith("Immutable.")
    }
    assert ruled == described == IMMUTABLE
    assert all(name in SPEC["description"] for name in IMMUTABLE)


# -- the status --------------------------------------------------------------------------------


def batchjob() -> model.BatchJob:
    return resources.parse(
        {
            "metadata": {
                "name": "nightly",
                "namespace": "billing",
                "uid": "0000",
                "generation": 3,
                "resourceVersion": "7",
            },
            "spec": {"job": "flights.settle"},
        }
    )


NOW = datetime(2026, 1, 31, 10, tzinfo=UTC)


def full_status() -> dict[str, Any]:
    """A status with every field that the operator ever writes."""
    execution = Execution(
        execution_id=UUID(int=1),
        status="FAILED",
        attempt=1,
        requested_at=NOW,
        started_at=NOW,
        ended_at=NOW,
        total=3,
        completed=2,
        failed=1,
        nodes=2,
        failed_partitions=(
            FailedPartition(key="2013-01-31", attempts=5, reason="ValueError", message="no"),
        ),
    )
    observed = Observed(
        batchjob=batchjob(), options=Options(cluster="main"), now=NOW, database_up=True
    )
    situation = status.Situation(
        attempt=1,
        execution=execution,
        accepted=Condition(type=Type.ACCEPTED, status="True", reason="Requested"),
        message="3 of 3 partitions have ended",
        master_job="nightly-1",
    )
    return status.render(observed, situation)


def mismatches(schema: Schema, value: Any, path: str) -> Iterator[str]:
    """Where a value is not as the schema says, or leaves something of it out."""
    if schema["type"] == "object":
        for name in schema["properties"].keys() ^ value.keys():
            yield f"{path}.{name} is on one side only"
        for name in schema["properties"].keys() & value.keys():
            yield from mismatches(schema["properties"][name], value[name], f"{path}.{name}")
    elif schema["type"] == "array":
        assert value, f"{path}: nothing to compare"
        for one in value:
            yield from mismatches(schema["items"], one, f"{path}[]")
    elif type(value) is not {"string": str, "integer": int}[schema["type"]]:
        yield f"{path} is {value!r}"
    elif value not in schema.get("enum", [value]):
        yield f"{path} is {value!r}, which is none of {schema['enum']}"


def test_the_status_that_the_operator_writes_is_the_one_that_the_crd_keeps() -> None:
    assert list(mismatches(STATUS, full_status(), "status")) == []


def test_every_condition_is_described() -> None:
    text = STATUS["properties"]["conditions"]["description"]
    kind = STATUS["properties"]["conditions"]["items"]["properties"]["type"]["description"]
    for one in Type:
        assert one in text
        assert one in kind


# -- the page ----------------------------------------------------------------------------------


def test_the_reference_page_is_that_of_the_crd() -> None:
    made = subprocess.run(
        [sys.executable, str(CRD_DIR / "document.py")], capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs" / "batchjob.md").read_text() == made, (
        "make reference brings it up to date"
    )
