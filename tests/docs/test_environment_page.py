"""The environment's docstring, its page: Gymnasium's form and the features of the layout."""

from __future__ import annotations

import inspect
import re

import pytest
from page import ROOT

from vllm_tenant_tuning import VLLMTenantTuningEnv
from vllm_tenant_tuning.spaces import (
    CLUSTER_FEATURES,
    TENANT_FEATURES,
    TTFT_FEATURES,
    Feature,
)

TEXT = inspect.getdoc(VLLMTenantTuningEnv) or ""
HEADINGS = (
    "Description",
    "Action Space",
    "Observation Space",
    "Rewards",
    "Starting State",
    "Episode End",
    "Arguments",
    "Version History",
)


def rows() -> dict[str, list[str]]:
    """Cells of the observation's tables after the first, by the feature."""
    found = {}
    for line in TEXT.splitlines():
        if line.startswith("| ") and not line.startswith("| Feature"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found[name.removesuffix(" (tokens)")] = cells
    return found


def test_the_page_is_the_docstring() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert "<!-- docstring: vllm_tenant_tuning.VLLMTenantTuningEnv -->" in page.splitlines()


def test_the_headings_are_gymnasiums_in_their_order() -> None:
    assert tuple(re.findall(r"^## (.*)$", TEXT, re.MULTILINE)) == HEADINGS


def test_every_feature_is_there_in_order() -> None:
    known = [f.name for f in (*TENANT_FEATURES, *TTFT_FEATURES, *CLUSTER_FEATURES)]
    assert list(rows()) == known


@pytest.mark.parametrize("feature", [*TENANT_FEATURES, *TTFT_FEATURES, *CLUSTER_FEATURES])
def test_bounds_and_units_are_those_of_the_layout(feature: Feature) -> None:
    _, unit, _, high = rows()[feature.name]
    assert float(high) == feature.high
    assert (unit == "s") == feature.field.endswith("_s")
    assert unit in ("s", "requests", "1")
