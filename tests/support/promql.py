"""What a PromQL expression asks for: parsed, taken apart, with Grafana's variables filled in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import promql_parser

_VARIABLES: Final = {"$__rate_interval": "5m", "$namespace": ".*", "$pool": ".*"}


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric that is asked for, and by which labels."""

    metric: str
    labels: frozenset[str]
    function: str
    """The function that it is the argument of, as `rate`; empty if none."""
    seconds: float
    """The range that is asked for; 0: none."""


def filled(expr: str, window: str = "5m") -> str:
    """The expression with values for the variables of a dashboard."""
    for variable, value in {**_VARIABLES, "$__rate_interval": window}.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, f"an unknown variable in {expr}"
    return expr


def selectors(expr: str) -> list[Selector]:
    """Every selector of an expression.

    :raises ValueError: it is no PromQL.
    """
    return list(_walk(promql_parser.parse(filled(expr)), ""))


def _walk(node: Any, function: str) -> Iterator[Selector]:  # Any: the parser has no common type
    kind = type(node).__name__
    if kind == "VectorSelector":
        labels = frozenset(one.name for one in node.matchers.matchers)
        yield Selector(node.name or "", labels, function, 0)
    elif kind == "MatrixSelector":
        labels = frozenset(one.name for one in node.vector_selector.matchers.matchers)
        seconds = node.range.total_seconds()
        yield Selector(node.vector_selector.name or "", labels, function, seconds)
    elif kind == "Call":
        for argument in node.args:
            yield from _walk(argument, node.func.name)
    elif kind == "BinaryExpr":
        yield from _walk(node.lhs, "")
        yield from _walk(node.rhs, "")
    elif kind in {"ParenExpr", "UnaryExpr", "AggregateExpr", "SubqueryExpr"}:
        yield from _walk(node.expr, function if kind == "ParenExpr" else "")
    else:
        assert kind in {"NumberLiteral", "StringLiteral"}, kind
