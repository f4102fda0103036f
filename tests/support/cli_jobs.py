"""Jobs that tests of the commands launch, as an author would write them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import rowlock


@dataclass(frozen=True)
class Numbers:
    """What to count, which numbers fail (until a file exists), and what must exist before any is done."""

    count: int
    fail: list[int] = field(default_factory=list[int])
    wait_for: str | None = None
    repaired: str | None = None


@dataclass(frozen=True)
class Summary:
    """The sum of all numbers."""

    total: int


class Count(rowlock.Job[Numbers, int, int]):
    """Returns each number; the summary is their sum."""

    name = "cli.count"
    retry = rowlock.Retry(max_attempts=1)

    def partition(self, params: Numbers, cluster: rowlock.Cluster) -> Iterator[int]:
        yield from range(params.count)

    def key(self, part: int) -> str:
        return f"n{part:04}"

    def process(self, part: int, ctx: rowlock.Context[Numbers]) -> int:
        while ctx.params.wait_for and not Path(ctx.params.wait_for).exists():
            if ctx.should_stop:
                return part
            time.sleep(0.005)  # author code that waits for something outside
        repaired = ctx.params.repaired is not None and Path(ctx.params.repaired).exists()
        if part in ctx.params.fail and not repaired:
            raise ValueError(f"{part} is odd")
        return part

    def finish(self, params: Numbers, outcome: rowlock.Outcome[int]) -> Summary:
        return Summary(total=sum(result for _, result in outcome.results()))


class Items(rowlock.Job[Numbers, int, int]):
    """Leaves out two items of each partition, and tells how far it is while it waits for its file."""

    name = "cli.items"

    def partition(self, params: Numbers, cluster: rowlock.Cluster) -> Iterator[int]:
        yield from range(params.count)

    def process(self, part: int, ctx: rowlock.Context[Numbers]) -> int:
        for item in range(2):
            ctx.skip({"line": item}, ValueError("no amount"))
        assert ctx.params.wait_for is not None
        while not Path(ctx.params.wait_for).exists():
            ctx.progress(57, 100)
            time.sleep(0.005)  # author code that waits for something outside
        return ctx.skipped


class Nothing(rowlock.Job[None, int, None]):
    """Takes nothing and has nothing to do."""

    name = "cli.nothing"

    def partition(self, params: None, cluster: rowlock.Cluster) -> Iterator[int]:
        yield from ()

    def process(self, part: int, ctx: rowlock.Context[None]) -> None:
        return None
