"""Tutorials and how-tos: their commands and their code run as they stand, only shorter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("moviepy")
pytest.importorskip("openai")
pytest.importorskip("sb3_contrib")
pytest.importorskip("statsmodels")

from llm_server import llm_server
from page import ROOT, apply_patch, blocks, play

DOCS = ROOT / "docs"
ENDPOINT = "http://localhost:8000/v1"
RUNS_OF_LLMS = {"llm": 2, "latency": 4, "again": 2, "mine": 2}
"""Folder by folder, their episodes."""
FOLDERS = ("envs", "agents", "baselines", "configs")

pytestmark = pytest.mark.slow


def with_records(folder: Path) -> Path:
    """A folder with the repository's records in it, as in a clone."""
    (folder / "baselines").symlink_to(ROOT / "baselines")
    return folder


def checkout(folder: Path) -> Path:
    """A copy of the sources; `folder/import` on PYTHONPATH is what makes a package of them."""
    for name in FOLDERS:
        # the compiled kernels come along, so that nothing compiles again
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("results"))
        if name != "envs":
            (folder / "envs" / name).symlink_to(folder / name)
    (folder / "import").mkdir()
    (folder / "import" / "vllm_tenant_tuning").symlink_to(folder / "envs")
    return folder


def test_train_an_agent(tmp_path: Path) -> None:
    assert play(DOCS / "tutorials" / "train_an_agent.md", tmp_path) == 8
    for run in ("reserved", "sweep", "compared"):
        assert (tmp_path / "runs" / run / "table.md").is_file()
    assert len(list((tmp_path / "runs" / "sweep").glob("seed-*/model.zip"))) == 2


def test_serve_your_traffic(tmp_path: Path) -> None:
    page = DOCS / "tutorials" / "serve_your_traffic.md"
    assert play(page, with_records(tmp_path)) == 11
    assert (tmp_path / "my-server.yaml").is_file()
    assert (tmp_path / "runs" / "simulated" / "table.md").is_file()
    assert not (tmp_path / "runs" / "protocol").exists()
    assert not (tmp_path / "runs" / "validation").exists()


def test_evaluate_an_llm(tmp_path: Path) -> None:
    with llm_server() as endpoint:
        page = DOCS / "tutorials" / "evaluate_an_llm.md"
        assert play(page, tmp_path, {ENDPOINT: endpoint.url}) == 8
        asked = len(endpoint.exchanges)
    played = {run: llm_episodes(tmp_path / "runs" / run) for run in RUNS_OF_LLMS}
    assert {run: len(found) for run, found in played.items()} == RUNS_OF_LLMS
    first, again = ({e["seed"]: e["return"] for e in played[run]} for run in ("llm", "again"))
    assert first == again
    # the replay asks nobody
    live = [episode for run, found in played.items() if run != "again" for episode in found]
    assert asked == sum(episode["decisions"]["attempts"] for episode in live)
    assert all(episode["decisions"]["answered"] for episode in live)


def llm_episodes(run: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if record["decisions"]]


@pytest.mark.parametrize("name", ["add_a_scenario", "add_a_policy", "add_a_backend"])
def test_how_to(tmp_path: Path, name: str) -> None:
    folder = checkout(tmp_path)
    page = DOCS / "howto" / f"{name}.md"
    played = play(page, folder, PYTHONPATH=str(folder / "import"))
    assert played == {"add_a_scenario": 5, "add_a_policy": 4, "add_a_backend": 3}[name]


def test_every_page_of_tutorials_and_how_tos_is_played_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    pages = [*(DOCS / "tutorials").glob("*.md"), *(DOCS / "howto").glob("*.md")]
    assert len(pages) == 6
    for page in pages:
        assert page.stem in text


def test_a_patch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("a = 1\nb = 2\n")
    apply_patch(file, " a = 1\n-b = 2\n+b = 3\n@@\n b = 3\n+c = 4\n", "page")
    assert file.read_text() == "a = 1\nb = 3\nc = 4\n"
    with pytest.raises(AssertionError, match="fits 0 times"):
        apply_patch(file, "-b = 2\n", "page")


def test_what_a_comment_says_is_read(tmp_path: Path) -> None:
    page = DOCS / "tutorials" / "train_an_agent.md"
    notes = [block.notes for block in blocks(page)]
    assert {"not run": "it installs"} in notes
    assert any("shorter in the test" in each for each in notes)
