"""Finds the jobs that this process can run, by name.

Jobs come from the entry points of installed packages (group `rowlock.jobs`) and from modules named
on the command line. Nothing that is stored in the database is ever imported or executed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final, TypeGuard

from rowlock.contract import Codec, codecs, contract_hash
from rowlock.contract_schema import Schema
from rowlock.errors import JobDefinitionError, NotFound, near_names
from rowlock.job import AnyJob, Job, job_title

__all__ = ["GROUP", "Definition", "Registry", "define"]

GROUP: Final = "rowlock.jobs"
"""The entry point group; a value is `package.module` or `package.module:Class`."""

_ROOT: Final[type] = Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A job with everything that follows from its class, computed once."""

    name: str
    """The name it is launched by."""

    job: AnyJob
    """The one instance of this process."""

    parameters: Codec[Any]
    """Reads and writes the parameters of an execution."""

    slice: Codec[Any]
    """Reads and writes the slice of a partition."""

    result: Codec[Any]
    """Reads and writes the result of a partition."""

    summary: Codec[Any]
    """Reads and writes what `finish()` returns."""

    schemas: Mapping[str, Schema]
    """The JSON Schema of each of the four, by the names above."""

    contract_hash: str
    """Changes when, and only when, what the four accept changes."""

    policy: Mapping[str, Any]
    """Retry, time-out and failure policy, as `Job.policy` gives them."""


class Registry:
    """The jobs of this process."""

    def __init__(self, jobs: Iterable[type[AnyJob]] = ()) -> None:
        """Make a registry of these classes.

        Raises:
            JobDefinitionError: Two classes have the same name, or a class is not complete.
        """
        self._definitions: dict[str, Definition] = {}
        for cls in jobs:
            self._add(cls)

    def load(self, imports: Sequence[str] = ()) -> Registry:
        """Add the jobs of installed packages and of these modules, and return the registry.

        Args:
            imports: What `--import` names: `package.module` or `package.module:Class`. Modules in
                the current directory are found as `python -m` finds them.

        Raises:
            JobDefinitionError: A module cannot be imported or defines no job, or two jobs have
                the same name.
        """
        _make_current_directory_importable()
        sources = [
            *((point.value, _origin(point)) for point in metadata.entry_points(group=GROUP)),
            *((value, f"--import {value}") for value in imports),
        ]
        for value, origin in sources:
            for cls in _classes(value, origin):
                self._add(cls)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all jobs, in order."""
        return tuple(sorted(self._definitions))

    @property
    def definitions(self) -> Mapping[str, Definition]:
        """All jobs by name."""
        return MappingProxyType(self._definitions)

    def definition(self, name: str) -> Definition:
        """The job with this name.

        Raises:
            NotFound: There is none; the error suggests near names.
        """
        if name not in self._definitions:
            raise NotFound("job", name, near_names(name, self._definitions))
        return self._definitions[name]

    def get(self, name: str) -> AnyJob:
        """The instance of the job with this name.

        Raises:
            NotFound: There is none; the error suggests near names.
        """
        return self.definition(name).job

    def _add(self, cls: type[AnyJob]) -> None:
        known = self._definitions.get(cls.name)
        if known is None:
            self._definitions[cls.name] = define(cls)
        elif type(known.job) is not cls:  # a class that is found twice is one job
            raise JobDefinitionError(
                f"two jobs are named {cls.name!r}: {job_title(type(known.job))} and "
                f"{job_title(cls)}; rename one"
            )


def define(cls: type[AnyJob], job: AnyJob | None = None) -> Definition:
    """Make the codecs of a job class and, if it is not given, its one instance.

    Raises:
        JobDefinitionError: The class cannot be made without arguments, or a type is no contract.
    """
    if not hasattr(cls, "name"):
        raise JobDefinitionError(f"{job_title(cls)}: has no name, so it is abstract; give it one")
    types = codecs(cls)
    if job is None:
        job = _instance(cls)
    schemas = types.schemas()
    return Definition(
        name=cls.name,
        job=job,
        parameters=types.parameters,
        slice=types.slice,
        result=types.result,
        summary=types.summary,
        schemas=MappingProxyType(schemas),
        contract_hash=contract_hash(schemas),
        policy=MappingProxyType(cls.policy()),
    )


def _instance(cls: type[AnyJob]) -> AnyJob:
    try:
        return cls()
    except Exception as error:
        raise JobDefinitionError(
            f"{job_title(cls)}: cannot be made: {type(error).__name__}: {error}; "
            "give __init__ no required arguments"
        ) from error


def _make_current_directory_importable() -> None:
    """Do for a console script what `python -m` does by itself, unless Python is told not to."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _origin(point: metadata.EntryPoint) -> str:
    package = f" of {point.dist.name}" if point.dist else ""
    return f"entry point {point.name}{package}"


def _classes(value: str, origin: str) -> list[type[AnyJob]]:
    """The job classes that `module` or `module:Class` stands for."""
    name, _, attribute = value.partition(":")
    module = _imported(name, origin)
    if attribute:
        named: object = getattr(module, attribute, None)
        if not _is_definition(named):
            known = sorted(key for key, item in vars(module).items() if _is_definition(item))
            raise JobDefinitionError(
                f"{origin}: {attribute} is no job of module {name}; its jobs are: "
                f"{', '.join(known) or 'none'}"
            )
        return [named]
    found = list(_definitions_in(module))
    if not found:
        raise JobDefinitionError(
            f"{origin}: module {name} defines no job; it needs a subclass of rowlock.Job with a "
            "name. Jobs imported from elsewhere count if they are listed in __all__"
        )
    return found


def _imported(name: str, origin: str) -> ModuleType:
    if name.endswith(".py") or "/" in name:
        remedy = name.removesuffix(".py").strip("./").replace("/", ".")
        raise JobDefinitionError(f"{origin}: name the module, not the file: {remedy}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _import_failed(name, origin, error) from error
        raise JobDefinitionError(
            f"{origin}: there is no module {error.name!r}; install its package, or run in the "
            "directory that holds it"
        ) from error
    except JobDefinitionError as error:
        raise JobDefinitionError(f"{origin}: {error}") from error
    # Whatever author code raises while it is imported, sys.exit() included, is the module's fault.
    except (Exception, SystemExit) as error:
        raise _import_failed(name, origin, error) from error


def _import_failed(name: str, origin: str, error: BaseException) -> JobDefinitionError:
    return JobDefinitionError(
        f"{origin}: module {name} cannot be imported: {type(error).__name__}: {error}"
    )


def _definitions_in(module: ModuleType) -> Iterator[type[AnyJob]]:
    """The jobs that the module, or a part of its package, defines or lists in `__all__`."""
    exported: Iterable[str] = getattr(module, "__all__", ())
    for key, item in vars(module).items():
        if _is_definition(item):
            own = item.__module__ == module.__name__
            part = item.__module__.startswith(f"{module.__name__}.")
            if own or part or key in exported:
                yield item


def _is_definition(item: object) -> TypeGuard[type[AnyJob]]:
    """Whether it is a job class with a name of its own, which is what makes it a job."""
    return isinstance(item, type) and issubclass(item, _ROOT) and "name" in vars(item)
