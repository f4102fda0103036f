"""`rowlock contract`: shows what a job takes and gives, as JSON Schemas."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from rowlock.cli import arguments, output
from rowlock.errors import NotFound, near_names
from rowlock.registry import Registry

POLICY_CHARS: Final = 400


def run(given: argparse.Namespace) -> int:
    """Print it, from the job's code if that is here, else from what nodes have published."""
    registry = Registry().load(given.imports)
    local = registry.definitions.get(given.job)
    if local is not None and given.hash in {None, local.contract_hash}:
        document: dict[str, Any] = {
            "job": given.job,
            "contract_hash": local.contract_hash,
            "source": "code",
            "delivery": str(local.job.delivery),
            "policy": dict(local.policy),
            "schemas": dict(local.schemas),
        }
    else:
        document = _published(arguments.dsn_of(given), given.job, given.hash, registry.names)
    if given.json:
        output.print_json(document)
        return 0
    schemas: Mapping[str, Any] = document.pop("schemas")
    document["policy"] = output.compact(document["policy"], limit=POLICY_CHARS)
    if "published_at" in document:
        document["published_at"] = output.local(document["published_at"])
    output.print_fields(document)
    for name in ("parameters", "slice", "result", "summary"):
        print(f"\n{name}:")
        output.print_json(schemas[name])
    return 0


def _published(
    dsn: str, job: str, contract_hash: str | None, local: tuple[str, ...]
) -> dict[str, Any]:
    from rowlock.cli.database import opened  # with the code here, no database is needed
    from rowlock.db import views

    with opened(dsn, "contract") as db:
        known = views.contracts(db, job=job, limit=arguments.ROWS_MAX)
        if not known:
            raise NotFound("job", job, near_names(job, {*local, *views.job_names(db)}))
        hashes = [one.contract_hash for one in known]
        if contract_hash is not None and contract_hash not in hashes:
            raise NotFound("contract", f"{job} {contract_hash}", hashes[:3])
        one = known[hashes.index(contract_hash) if contract_hash else 0]
        return {
            "job": job,
            "contract_hash": one.contract_hash,
            "source": "published",
            "nodes": one.nodes,
            "published_at": one.published_at,
            "delivery": one.delivery,
            "policy": one.policy,
            "schemas": views.schemas(db, job, one.contract_hash),
        }
