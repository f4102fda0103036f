"""Prints docs/batchjob.md, the reference of BatchJob, from crd.yaml: `make reference`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

# A part of an OpenAPI schema: its shape is that standard's business.
Schema = dict[str, Any]

HEAD = """\
# BatchJob

One job, run once to its end: `kubectl explain batchjob.spec` says the same as this page. It is made from
[`manifests/crd/crd.yaml`](../manifests/crd/crd.yaml) by `make reference`; [kubernetes.md](kubernetes.md)
shows how to install and use it.

"""

BOUNDS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "minLength": "not empty",
    "maxLength": "at most {} characters",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} properties",
}


def page(crd: Schema) -> str:
    """The whole page."""
    names = crd["spec"]["names"]
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    columns = version["additionalPrinterColumns"]
    lines = [
        (
            f"`apiVersion: {crd['spec']['group']}/{version['name']}`, `kind: {names['kind']}`, "
            f"short name `{names['shortNames'][0]}`, category `{names['categories'][0]}`."
        ),
        "",
        schema["description"],
        "",
        *refusals(own_rules(schema)),
        *section("spec", schema["properties"]["spec"]),
        *section("status", schema["properties"]["status"]),
        "## In `kubectl get`",
        "",
        "| column | shows | |",
        "|---|---|---|",
        *(
            f"| {one['name']} | `{one['jsonPath']}`: {one['description']} "
            f"| {'with `-o wide`' if one.get('priority') else ''} |"
            for one in columns
        ),
        "",
        "`--field-selector` takes "
        + ", ".join(f"`{one['jsonPath'][1:]}`" for one in version["selectableFields"])
        + " (and `metadata.name`).",
    ]
    return HEAD + "\n".join(lines) + "\n"


def section(path: str, schema: Schema) -> Iterator[str]:
    """A chapter for an object, and after it one for each object in it."""
    yield from (f"## {path}", "", schema["description"], "")
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        default = "**required**" if name in required else shown(field.get("default"))
        yield f"| `{name}` | {type_of(field)} | {default} | {meaning(field)} |"
    yield ""
    yield from refusals(list(all_rules(schema)))
    for name, field in schema["properties"].items():
        inner = field.get("items", field)
        if "properties" in inner:
            yield from section(f"{path}.{name}{'[]' if 'items' in field else ''}", inner)


def refusals(messages: list[str]) -> Iterator[str]:
    """What the API server refuses, by the messages it gives."""
    if messages:
        yield from ("The API server refuses the rest:", "", *(f"- {one}" for one in messages), "")


def own_rules(schema: Schema) -> list[str]:
    """Those of the object itself."""
    return [one["message"] for one in schema.get("x-kubernetes-validations", [])]


def all_rules(schema: Schema) -> Iterator[str]:
    """Those of the object and of its plain fields; objects in it have a chapter of their own."""
    yield from own_rules(schema)
    for name, field in schema["properties"].items():
        if "properties" not in field:
            for message in own_rules(field):
                yield message if name in message else f"{name} {message}"


def type_of(field: Schema) -> str:
    """For people."""
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in field:
        return " \\| ".join(f"`{one}`" for one in field["enum"])
    if "items" in field:
        return f"list of {field['items']['type']}s"
    return "time" if field.get("format") == "date-time" else str(field["type"])


def meaning(field: Schema) -> str:
    """The description, and the bounds after it."""
    text = field["description"].replace("|", "\\|")
    bounds = [form.format(field[name]) for name, form in BOUNDS.items() if name in field]
    return f"{text} ({', '.join(bounds)})" if bounds else text


def shown(default: object) -> str:
    """A default as JSON writes it, which YAML reads."""
    return "" if default is None else f"`{json.dumps(default)}`"


def main() -> None:
    """Print it."""
    crd = yaml.safe_load(Path(__file__).with_name("crd.yaml").read_text())
    sys.stdout.write(page(crd))


if __name__ == "__main__":
    main()
