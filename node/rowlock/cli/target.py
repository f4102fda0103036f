"""What a launch is about: a job, found here or among published contracts, with checked parameters.

Wrong parameters end here, before anything is written.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rowlock.contract_schema import absent_parameters, check_against_schema
from rowlock.db import views
from rowlock.db.views import Connection
from rowlock.errors import NotFound, UsageError, near_names
from rowlock.jsontext import PARAMETERS_BYTES, check_json
from rowlock.registry import Registry

_NODES_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A job with the parameters to launch it with."""

    job: str
    contract_hash: str
    policy: Mapping[str, Any]
    delivery: str
    parameters: str
    """JSON text, as it will be stored."""
    local: bool
    """Whether the job's code is here."""


def local_target(registry: Registry, job: str, given: str | None) -> Target | None:
    """The target if the job's code is here; None if it is not.

    Args:
        registry: The jobs of this process.
        job: Name of the job.
        given: What `--params` said; None if it was not given.

    Raises:
        ContractError: The parameters are not what the job takes; names the path.
    """
    definition = registry.definitions.get(job)
    if definition is None:
        return None
    parameters = parameters_text(given, definition.schemas["parameters"])
    definition.parameters.decode(parameters)
    return Target(
        job=job,
        contract_hash=definition.contract_hash,
        policy=definition.policy,
        delivery=str(definition.job.delivery),
        parameters=parameters,
        local=True,
    )


def published_target(db: Connection, registry: Registry, job: str, given: str | None) -> Target:
    """The target from the contract that living nodes accept, else from the newest one.

    Raises:
        NotFound: No node has published the job; suggests near names, also of jobs that are here.
        ContractError: The parameters do not fit the schema; names the path.
    """
    known = views.contracts(db, job=job, limit=1)
    if not known:
        raise NotFound("job", job, near_names(job, {*registry.names, *views.job_names(db)}))
    contract = known[0]
    schema = views.schemas(db, job, contract.contract_hash)["parameters"]
    parameters = parameters_text(given, schema)
    check_against_schema(schema, parameters, "parameters")
    return Target(
        job=job,
        contract_hash=contract.contract_hash,
        policy=contract.policy,
        delivery=contract.delivery,
        parameters=parameters,
        local=False,
    )


def has_nodes(db: Connection, job: str, contract_hash: str, pool: str) -> bool:
    """Whether any living node of a pool accepts a contract and has slots for it."""
    there = views.nodes(db, pool=pool, limit=_NODES_MAX)
    return any(one.slots and contract_hash in one.jobs.get(job, ()) for one in there)


def parameters_text(given: str | None, schema: Mapping[str, Any]) -> str:
    """The JSON text of `--params`: as written, from a file (`@file`), or from standard input (`@-`).

    Raises:
        UsageError: The file cannot be read.
        ContractError: It is no JSON that the database could keep.
    """
    if given is None:
        return absent_parameters(schema)
    return check_json(
        _read(given) if given.startswith("@") else given, "parameters", PARAMETERS_BYTES
    )


def _read(given: str) -> bytes:
    name = given[1:]
    # One byte more than allowed is enough to be refused; a device would never end.
    limit = 16 * PARAMETERS_BYTES
    try:
        if name == "-":
            return sys.stdin.buffer.read(limit)
        with Path(name).open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise UsageError(
            f"--params {given} cannot be read: {error.strerror or error}; "
            "write @ and the path of a JSON file, or the JSON itself"
        ) from error
