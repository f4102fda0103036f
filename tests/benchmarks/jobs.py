"""Jobs that do nothing, so that what is measured is rowlock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import rowlock


@dataclass(frozen=True)
class Size:
    """How many partitions."""

    partitions: int


class Noop(rowlock.Job[Size, int, None]):
    """Partitions that return at once."""

    name = "bench.noop"

    def partition(self, params: Size, cluster: rowlock.Cluster) -> Iterator[int]:
        yield from range(params.partitions)

    def process(self, part: int, ctx: rowlock.Context[Size]) -> None:
        return None
