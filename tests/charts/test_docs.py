"""The values in docs/helm.md are values of the chart."""

import re

import pytest
import yaml

from tests.support.helm import ROOT, Helm, Rendered

PAGE = (ROOT / "docs" / "helm.md").read_text()
EXAMPLES = re.findall(r"^```yaml\n(# values\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_is_taken(helm: Helm, text: str) -> None:
    values = yaml.safe_load(text)
    chart = Rendered(helm.render(values))
    pools = {"default", *values["workers"].get("pools", {})}
    assert {f"r-rowlock-worker-{pool}" for pool in pools} <= {
        one["metadata"]["name"] for one in chart.of("Deployment")
    }


def test_the_commands_name_values_that_exist(helm: Helm) -> None:
    assignments = re.findall(r"--set ([a-zA-Z.]+)=(\S+?)`? ", f"{PAGE} ")
    assert assignments
    for name, value in assignments:
        helm.lint({}, flags=("--set", f"{name}={value.strip('`.…') or 'x'}"))
