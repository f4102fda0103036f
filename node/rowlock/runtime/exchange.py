"""One exchange of a node with the database: results go out, partitions come in, in one transaction."""

from __future__ import annotations

import time
from dataclasses import dataclass
from uuid import UUID

from rowlock.db.store import Store
from rowlock.protocol.lines import SLOW_SECONDS, Lines
from rowlock.protocol.model import Claim, Completion, ExecutionFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an exchange."""

    outcomes: dict[int, str]
    claims: list[Claim]
    facts: dict[UUID, ExecutionFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Completions to send and partitions to claim, carried out on the work connection."""

    node_id: UUID
    completions: list[Completion]
    slots: int
    prefetch: int
    idle: bool | None
    """The node runs nothing at all; None: nor would it if it claimed nothing."""
    seed: int
    known: frozenset[UUID]
    """Executions of which the node has the facts."""
    notices: int
    """How often work had been noticed when it began."""
    lines: Lines
    """Only the exchange under way has them: they are used on the thread that carries it out."""

    @property
    def claims(self) -> bool:
        """Whether it claims at all."""
        return bool(self.slots or self.prefetch)

    def run(self, store: Store) -> Answer:
        """Carry it out. After an error nothing was written: the completions are to be sent again."""
        outcomes: dict[int, str] = {}
        claims: list[Claim] = []
        if not self.claims:
            outcomes = store.complete(self.node_id, self.completions)
        else:
            began = time.monotonic()
            if self.lines.must_look(began):
                passed = store.passed(self.node_id, SLOW_SECONDS)
                self.lines.looked(passed, began, time.monotonic())
            outcomes, claims = store.complete_and_claim(
                self.node_id,
                self.completions,
                slots=self.slots,
                prefetch=self.prefetch,
                idle=self.idle,
                seed=self.seed,
                after=self.lines.passed,
            )
            self.lines.claimed(claims)
        facts: dict[UUID, ExecutionFacts] = {}
        for execution in {claim.execution_id for claim in claims} - self.known:
            found = store.execution_of(execution)
            if found is not None:
                facts[execution] = found
        return Answer(outcomes=outcomes, claims=claims, facts=facts)
