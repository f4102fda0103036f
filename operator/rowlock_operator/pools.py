"""How a master pod of each pool looks: the mounted pools file, read strictly.

The file is the chart's: it holds the pod template of the pool's Deployment, so that a master has the
same image, environment and Secrets as the workers, and the operator needs no right to read either.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rowlock.errors import SettingsError
from rowlock_operator.model import Json, Pool
from rowlock_operator.resources import as_list, as_object, is_object, is_whole

_KNOWN = frozenset({"slots", "template"})
MAIN_CONTAINER = "rowlock"
"""The container that runs the master; the first one of the template if none has this name."""


def parse_pools(document: object) -> Mapping[str, Pool]:
    """The pools of a document: `pools: {NAME: {slots: 4, template: {metadata, spec}}}`.

    Raises:
        SettingsError: Something is wrong in it; everything is listed.
    """
    problems: list[str] = []
    listed: object = as_object(document).get("pools")
    if not is_object(listed):
        raise SettingsError(["pools: a map from the name of each pool to its template is expected"])
    pools = {str(name): _pool(str(name), value, problems) for name, value in listed.items()}
    if problems:
        raise SettingsError(problems)
    return MappingProxyType(pools)


def main_container(containers: list[Json]) -> int | None:
    """The index of the container that runs the master; None if there is no container."""
    names = [as_object(one).get("name") for one in containers]
    if MAIN_CONTAINER in names:
        return names.index(MAIN_CONTAINER)
    return 0 if names else None


def _pool(name: str, value: object, problems: list[str]) -> Pool:
    path = f"pools.{name}"
    fields = as_object(value)
    unknown = [f"{path}.{field} is no known field" for field in fields if field not in _KNOWN]
    problems.extend(unknown)
    slots = fields.get("slots", 0)
    if not is_whole(slots) or slots < 0:
        problems.append(f"{path}.slots is {slots!r}; a whole number of 0 or more is expected")
        slots = 0
    template = as_object(fields.get("template"))
    containers = as_list(as_object(template.get("spec")).get("containers"))
    if not containers:
        problems.append(f"{path}.template.spec.containers is missing: name the worker's container")
    for index, container in enumerate(containers):
        if not isinstance(as_object(container).get("name"), str):
            problems.append(f"{path}.template.spec.containers[{index}].name is missing")
    return Pool(name=name, slots=slots, template=template)
