"""The public simulator measured beside the engine plays the load that the comparison claims."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vllm_tenant_tuning.profile import load_profile

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "compare.py"


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("peers_compare", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def package(peers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    try:
        found: Path = peers.find_or_install(tmp_path_factory.mktemp("peer"))
    except peers.PeerError as error:
        pytest.skip(f"the peer cannot be installed: {error}")
    return found


def test_both_play_the_same_load_and_the_ratio_is_of_their_figures(
    peers: ModuleType, package: Path
) -> None:
    result = peers.compare(package, loads=[(20.0, 150.0)], rounds=1, repeats=1)
    (load,) = result["loads"]
    engine, matched = load["engine"], load["peer"]["matched"]
    for peer in load["peer"].values():
        assert peer["completed"] == load["requests"]
        assert peer["preemptions"] == 0
        assert peer["completed_within_horizon"] == pytest.approx(
            engine["completed_within_horizon"], rel=0.02
        )
        # one round: the medians are the figures themselves
        assert peer["times_faster"]["median"] == pytest.approx(
            engine["real_time_ratio"]["median"] / peer["real_time_ratio"]["median"]
        )
        assert peer["real_time_ratio_with_result"]["median"] <= peer["real_time_ratio"]["median"]
    # the same figures of hardware: two step laws, one kind of system
    assert matched["mean_tpot_s"] == pytest.approx(engine["mean_tpot_s"], rel=0.15)
    assert matched["mean_latency_s"] == pytest.approx(engine["mean_latency_s"], rel=0.15)


def test_the_peer_reads_the_configuration_in_our_units(peers: ModuleType, package: Path) -> None:
    profile = load_profile("h200-llama-3.1-8b")
    hardware = peers.hardware_variants(profile)["data_sheet"]
    alone = peers.peer_configuration(profile, hardware, 1.0, 1, 0)
    measured = peers.run_peer(package, alone, alone, horizon_s=100.0, repeats=1)
    # a lone sequence decodes at the bandwidth: the weights and, on average, 1024 + 128 tokens
    bytes_per_step = 8.03e9 * 2 + (1024 + 128) * 2 * 8 * 128 * 2 * 32
    assert measured["mean_tpot_s"] == pytest.approx(bytes_per_step / 4.8e12, rel=1e-3)
    assert measured["completed"] == measured["completed_within_horizon"] == 1
    # the prompt is computed in one step, at the arithmetic rate of 2 operations a parameter or more
    step_s = 1024 * 2 * 8.03e9 / 989.5e12
    assert step_s < measured["mean_ttft_s"] - measured["mean_tpot_s"] < 1.1 * step_s


def test_what_is_not_the_peer_is_refused(
    peers: ModuleType, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(peers.PeerError, match=r"package\.json"):
        peers.run_peer(tmp_path, {}, {}, horizon_s=1.0)
    with pytest.raises(peers.PeerError, match="missing field"):
        peers.run_peer(package, {}, {}, horizon_s=1.0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(peers.PeerError, match="node: not found"):
        peers.run_peer(package, {}, {}, horizon_s=1.0)
