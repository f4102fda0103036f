"""Parameters are checked against the published schema before anything is written."""

from dataclasses import replace
from typing import Any

import pytest

from rowlock_operator.launch import request
from rowlock_operator.refusal import Reason, Refusal
from tests.support.batchjobs import CONTRACT, a_batchjob, an_observation


def requested(parameters: Any, schema: dict[str, Any]) -> str:
    contract = replace(CONTRACT, schemas={"parameters": schema})
    batchjob = a_batchjob({"parameters": parameters})
    return request(an_observation(batchjob, contract=contract), 1).parameters


def test_parameters_go_as_they_are_written() -> None:
    given = {"month": "2026-11", "région": "Île-de-France", "share": 0.5, "none": None}

    assert requested(given, {"type": "object"}) == (
        '{"month": "2026-11", "région": "Île-de-France", "share": 0.5, "none": null}'
    )


@pytest.mark.parametrize("schema, text", [({"type": "object"}, "{}"), ({"type": "null"}, "null")])
def test_absent_parameters_are_what_the_job_takes(schema: dict[str, Any], text: str) -> None:
    assert requested(None, schema) == text


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    "given, says",
    [
        ({"big": "x" * 300_000}, r"spec.parameters \$: is 300\d\d\d bytes long"),
        ({"nul": "a\0b"}, r"spec.parameters \$.nul: contains the NUL character"),
        ({"wide": 2**70}, r"spec.parameters \$.wide: .* does not fit into 64 bits"),
        (nested(40), r"spec.parameters .*: is nested deeper than 32 levels"),
        (nested(100_000), r"spec.parameters \$: is nested too deep"),
    ],
    ids=["large", "NUL", "wide", "deep", "too deep to look at"],
)
def test_what_the_database_would_refuse_is_refused_before(given: Any, says: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        requested(given, {"type": "object"})

    assert caught.value.reason is Reason.INVALID_PARAMETERS
