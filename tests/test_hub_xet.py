"""Publishing through xet, the Hub's storage of chunks: its real code, on a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard import verify
from tests.checkpoints import build
from tests.conftest import Online
from tests.hub_server import HubServer, xet_files

pytest.importorskip("hf_xet")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub whose weight files are in xet, and whose small files are in git."""
    storage = tmp_path / "xet"
    storage.mkdir()
    with HubServer(tmp_path / "hub-storage", xet=storage) as server:
        server.lfs_size = 10_000_000
        yield server


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_a_set_goes_through_xet_and_back(tmp_path: Path, hub: HubServer, online: Online) -> None:
    source = build(tmp_path / "source")
    assert online("split", source, tmp_path / "out", "--pp-size", 2).code == 0
    pushed = json.loads(online("push", tmp_path / "out", "me/bundles", "--json").out)
    weights = {path.name: path for path in (tmp_path / "out").rglob("*.safetensors")}
    assert not [request for request in hub.requests if request.method == "PUT"]
    sizes = {size for _, size in xet_files(tmp_path / "xet").values()}
    assert {path.stat().st_size for path in weights.values()} <= sizes

    again = json.loads(online("push", tmp_path / "out", "me/bundles", "--json").out)
    assert (again["changed"], again["commit"]) == (False, pushed["commit"])

    before = stored_bytes(tmp_path / "xet")
    online("split", tmp_path / "out", tmp_path / "three", "--pp-size", 3)
    moved = json.loads(online("push", tmp_path / "three", "me/bundles", "--json").out)
    assert moved["copied"] == len(weights) + 1  # embed is on two stages
    assert stored_bytes(tmp_path / "xet") == before

    fetch = [Path(sys.executable).parent / "hf", "download", "me/bundles", "--quiet"]
    fetch += ["--include", "stage-01-of-03/*", "--local-dir", tmp_path / "fetched"]
    subprocess.run(
        fetch, check=True, capture_output=True, env=hub.environment(tmp_path / "hf-home")
    )
    assert verify(tmp_path / "fetched" / "stage-01-of-03", source=source).ok
