"""The program of `helm test`: what it takes for a good end, and what it says otherwise."""

import importlib.util
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.support.helm import CHART

Condition = tuple[str, str, str]
PENDING: list[Condition] = []
ACCEPTED: list[Condition] = [("Accepted", "True", "Accepted")]
COMPLETE: list[Condition] = [("Finished", "True", "Completed"), ("Complete", "True", "Completed")]
FAILED: list[Condition] = [("Finished", "True", "Failed"), ("Complete", "False", "Failed")]
UNKNOWN: list[Condition] = [("Accepted", "False", "UnknownJob")]
INVALID: list[Condition] = [("Accepted", "False", "InvalidParameters")]
Serve = Callable[..., list[str]]


@pytest.fixture
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run", CHART / "files" / "run_batchjob.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Answer with one status after the other; the last one stays. What was asked."""

    def serving(
        *statuses: list[Condition], expect: str = "Finished", seconds: float = 10
    ) -> list[str]:
        waiting = list(statuses)
        asked: list[str] = []

        def call(method: str, path: str, body: Any = None) -> dict[str, Any]:
            asked.append(method)
            if method == "POST":
                return {"metadata": {"name": f"{body['metadata']['generateName']}x"}}
            conditions = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            named = [
                {"type": kind, "status": is_so, "reason": why} for kind, is_so, why in conditions
            ]
            return {"status": {"phase": path, "conditions": named}}

        monkeypatch.setattr(program, "call", call)
        monkeypatch.setattr(program, "POLL_SECONDS", 0.001)
        monkeypatch.setenv("SPEC", json.dumps({"job": "a"}))
        monkeypatch.setenv("EXPECT", expect)
        monkeypatch.setenv("TIMEOUT_SECONDS", str(seconds))
        return asked

    return serving


def test_a_batchjob_that_completes_is_taken_away(program: ModuleType, serve: Serve) -> None:
    asked = serve(PENDING, ACCEPTED, COMPLETE)
    assert program.main() == 0
    assert asked == ["POST", "GET", "GET", "GET", "DELETE"]


def test_the_refusal_of_a_job_that_nobody_has_is_the_expected_answer(
    program: ModuleType, serve: Serve
) -> None:
    asked = serve(PENDING, UNKNOWN, expect="UnknownJob")
    assert program.main() == 0
    assert asked[-1] == "DELETE"


@pytest.mark.parametrize(
    "end",
    [
        (FAILED, "Finished", "it finished as"),
        (INVALID, "Finished", "refused: "),
        (COMPLETE, "UnknownJob", "it finished as"),
    ],
)
def test_any_other_end_fails_and_stays_to_be_looked_at(
    program: ModuleType,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    end: tuple[list[Condition], str, str],
) -> None:
    conditions, expect, says = end
    asked = serve(conditions, expect=expect)
    assert program.main() == 1
    assert says in capsys.readouterr().out
    assert "DELETE" not in asked


def test_nodes_that_only_just_start_are_waited_for(program: ModuleType, serve: Serve) -> None:
    asked = serve(UNKNOWN, UNKNOWN, ACCEPTED, COMPLETE)
    assert program.main() == 0
    assert asked[-1] == "DELETE"


def test_one_that_never_ends_fails_in_time(
    program: ModuleType, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(ACCEPTED, seconds=0.05)
    assert program.main() == 1
    assert "not Finished after 0.05 s" in capsys.readouterr().out
