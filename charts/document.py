"""Writes what follows from others: the schema and the documented table of the chart's values, and its copies.

    make reference       writes them; a test compares what is there with what this would write

values.yaml is the source of the values: names, defaults, and a `# --` comment for each. What a default
cannot say about its type stands in the tables here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import yaml

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "charts" / "rowlock"
MANIFESTS: Final = ROOT / "manifests"
PAGE: Final = ROOT / "docs" / "helm.md"
BEGIN: Final = "<!-- values: made by charts/document.py -->\n"
END: Final = "<!-- end of values -->\n"

Schema = dict[str, Any]
"""A JSON Schema; its shape is its own."""

_STRING: Final[Schema] = {"type": "string"}
_STRINGS: Final[Schema] = {"type": "object", "additionalProperties": _STRING}
_OPEN: Final[Schema] = {"type": "object"}
_OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object"}}
_NAMED: Final[Schema] = {"type": "array", "items": {"type": "object", "required": ["name"]}}
_TEXTS: Final[Schema] = {"type": "array", "items": _STRING}
_PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_ONE_OR_MORE: Final[Schema] = {"type": "integer", "minimum": 1}
_SECONDS: Final[Schema] = {"type": "number", "exclusiveMinimum": 0}
_AMOUNT: Final[Schema] = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%?$"}
_WORD: Final[Schema] = {"type": "string", "pattern": r"^[^\s'\\]*$"}
_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"

# By the last name of a value, whatever it belongs to.
_BY_NAME: Final[dict[str, Schema]] = {
    **dict.fromkeys(["resources", "podSecurityContext", "securityContext", "strategy"], _OPEN),
    **dict.fromkeys(["behavior", "affinity", "dnsConfig", "lifecycle", "tmp", "fallback"], _OPEN),
    **dict.fromkeys(["livenessProbe", "readinessProbe", "startupProbe", "parameters"], _OPEN),
    **dict.fromkeys(["labels", "podLabels", "podAnnotations", "annotations"], _STRINGS),
    **dict.fromkeys(["commonLabels", "commonAnnotations", "nodeSelector", "ruleLabels"], _STRINGS),
    **dict.fromkeys(["env", "volumes", "initContainers", "extraContainers"], _NAMED),
    **dict.fromkeys(["volumeMounts", "imagePullSecrets"], _NAMED),
    **dict.fromkeys(["imports", "extraArgs", "watchNamespaces", "disabled"], _TEXTS),
    **dict.fromkeys(["replicas", "minReplicas", "backoffLimit", "revisionHistoryLimit"], _COUNT),
    **dict.fromkeys(["maxReplicas", "slots", "pollingInterval", "cooldownPeriod"], _ONE_OR_MORE),
    **dict.fromkeys(["activeDeadlineSeconds", "progressDeadlineSeconds"], _ONE_OR_MORE),
    **dict.fromkeys(["syncSeconds", "resyncSeconds", "watchSeconds"], _SECONDS),
    **dict.fromkeys(["sweepSeconds", "staleSeconds"], _SECONDS),
    "timeoutSeconds": _SECONDS,
    "readSeconds": _ONE_OR_MORE,
    "drainSeconds": {"type": "number", "minimum": 0},
    "terminationGracePeriodSeconds": _COUNT,
    "port": _PORT,
    "apiServerPorts": {"type": "array", "items": _PORT, "minItems": 1},
    "maxUnavailable": _AMOUNT,
    "pullPolicy": {"enum": ["", "Always", "IfNotPresent", "Never"]},
    "digest": {"type": "string", "pattern": "^(sha256:[a-f0-9]{64})?$"},
    "tag": _STRING,
    "hostUsers": {"type": ["boolean", "null"]},
    "dnsPolicy": {"enum": ["", "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]},
    "logFormat": {"enum": ["json", "human"]},
    "unhealthyPodEvictionPolicy": {"enum": ["AlwaysAllow", "IfHealthyBudget"]},
    "partitionsPerNode": {"type": ["integer", "null"], "minimum": 1},
}
# By the whole path, which goes before the last name.
_BY_PATH: Final[dict[str, Schema]] = {
    "database.sslMode": {
        "enum": ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]
    },
    # They stand in a connection string of libpq.
    "database.host": _WORD,
    "database.name": _WORD,
    "migrations.mode": {"enum": ["hook", "initContainer"]},
    "rbac.scope": {"enum": ["cluster", "namespace"]},
    "workers.autoscaling.type": {"enum": ["none", "hpa", "keda"]},
    "workers.autoscaling.keda.trigger": {"enum": ["postgresql", "prometheus"]},
    "workers.master.slots": {"type": ["integer", "null"], "minimum": 0},
    "workers.settings": {
        "type": "object",
        "propertyNames": {"pattern": "^ROWLOCK_[A-Z_]+$"},
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    },
    "operator.cluster": {"type": "string", "pattern": f"^{_LABEL}$", "maxLength": 63},
    "operator.watchNamespaces": {
        "type": "array",
        "items": {"type": "string", "pattern": f"^{_LABEL}$"},
    },
    "metrics.prometheusRule.thresholds": {
        "type": "object",
        "additionalProperties": {"type": "number"},
    },
    "metrics.prometheusRule.for": {
        "type": "object",
        "additionalProperties": {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"},
    },
    "metrics.prometheusRule.severities": _STRINGS,
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    "global": _OPEN,
    "workers.pools": _OPEN,  # in full below, from the values of workers
}
_POOL_NAME: Final = {"pattern": f"^{_LABEL}$", "maxLength": 63}
# Whose own values stand beside those of podDefaults.
_COMPONENTS: Final = ("operator", "workers", "migrations", "exporter", "tests", "demo.postgres")


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a user may set."""

    path: str
    """For example operator.replicas."""
    default: object
    meaning: str


def read_values(text: str) -> list[Value]:
    """The values of a values.yaml, in its order: every key under a `# --` comment.

    Args:
        text: Its text.

    Raises:
        ValueError: A value has no comment.
    """
    defaults = yaml.safe_load(text)
    meanings = dict(_meanings(text))
    return list(_values("", defaults, meanings))


def _meanings(text: str) -> Iterator[tuple[str, str]]:
    """Paths and what their comments say."""
    above: list[tuple[int, str]] = []
    comment: list[str] | None = None
    for line in text.splitlines():
        key = re.match(r"( *)([A-Za-z]\w*):(?: |$)", line)
        said = re.match(r" *# (-- )?(.*)", line)
        if said and said[1]:
            comment = [said[2]]
        elif said and comment is not None:
            comment.append(said[2])
        elif key:
            indent = len(key[1])
            above = [(depth, name) for depth, name in above if depth < indent]
            above.append((indent, key[2]))
            if comment is not None:
                yield ".".join(name for _, name in above), " ".join(comment)
            comment = None
        else:
            comment = None


def _values(prefix: str, defaults: Schema, meanings: dict[str, str]) -> Iterator[Value]:
    for name, default in defaults.items():
        path = f"{prefix}{name}"
        if path == "workers.pools":
            yield Value(
                path, default, "The pools, by name: each with any of the values of workers."
            )
        elif path in meanings:
            yield Value(path, default, meanings[path])
        elif isinstance(default, dict) and default:
            yield from _values(f"{path}.", cast(Schema, default), meanings)
        else:
            raise ValueError(f"{path} has no comment of # --")


# -- the schema --------------------------------------------------------------------------------


def schema_of(values: list[Value]) -> Schema:
    """The JSON Schema of the values: closed everywhere but where Kubernetes' own objects stand."""
    root = _closed()
    for value in values:
        names = value.path.split(".")
        place = root
        for name in names[:-1]:
            place = place["properties"].setdefault(name, _closed())
        place["properties"][names[-1]] = {
            "description": value.meaning,
            **_type(value.path, value.default),
        }
    properties: Schema = root["properties"]
    # A parent chart sets it: `condition: rowlock.enabled`.
    properties["enabled"] = {"type": "boolean", "description": "Read by a parent chart alone."}
    for path in _COMPONENTS:
        component = root
        for name in path.split("."):
            component = component["properties"][name]
        component["properties"] = {**_as_in("podDefaults", root), **component["properties"]}
    workers: Schema = properties["workers"]["properties"]
    del workers["pools"]
    pool = {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": _as_in("workers", root),
    }
    workers["pools"] = {
        "type": "object",
        "propertyNames": _POOL_NAME,
        "additionalProperties": {"$ref": "#/definitions/pool"},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart rowlock",
        **root,
        "definitions": {"pool": pool},
    }


def _as_in(name: str, root: Schema) -> Schema:
    """The properties of a value of the root, to be said once more."""
    place = f"#/properties/{name}/properties"
    return {one: {"$ref": f"{place}/{one}"} for one in root["properties"][name]["properties"]}


def _closed() -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _type(path: str, default: Any) -> Schema:
    name = path.rsplit(".", maxsplit=1)[-1]
    if path in _BY_PATH:
        return _BY_PATH[path]
    if name in _BY_NAME:
        return _BY_NAME[name]
    if isinstance(default, dict) and default:
        members = cast(Schema, default)
        return {
            **_closed(),
            "properties": {one: _type(f"{path}.{one}", value) for one, value in members.items()},
        }
    if isinstance(default, list):
        return _OBJECTS
    kinds = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"))
    kind = next((word for one, word in kinds if isinstance(default, one)), None)
    if kind is None:
        raise ValueError(f"{path}: nobody can tell its type from {default!r}; say it in a table")
    return {"type": kind}


# -- the page and the copies -------------------------------------------------------------------


def table_of(values: list[Value]) -> str:
    """The values as a table of Markdown."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for value in values:
        cells = (f"`{value.path}`", f"`{json.dumps(value.default)}`", value.meaning)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page_with(table: str, page: str) -> str:
    """The page with this table in its place."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def rules_of(manifest: Path) -> str:
    """The rules of a Role in the manifests, word for word."""
    text = manifest.read_text()
    return text[text.index("rules:\n") :]


def files() -> dict[Path, str]:
    """Every file that follows from others, and what it should say."""
    values = read_values((CHART / "values.yaml").read_text())
    rbac = MANIFESTS / "rbac"
    return {
        CHART / "values.schema.json": json.dumps(schema_of(values), indent=2) + "\n",
        PAGE: page_with(table_of(values), PAGE.read_text()),
        CHART / "files" / "crd.yaml": (MANIFESTS / "crd" / "crd.yaml").read_text(),
        CHART / "files" / "operator-rules.yaml": rules_of(rbac / "namespaced" / "role.yaml"),
        CHART / "files" / "users-view-rules.yaml": rules_of(rbac / "users" / "view.yaml"),
        CHART / "files" / "users-edit-rules.yaml": rules_of(rbac / "users" / "edit.yaml"),
    }


def main() -> int:
    """Write them."""
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
