"""Pulling stages out of a repository: the same bytes as from a local set, whatever goes wrong."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import safetensors

from reshard import build_plan, open_checkpoint, pull, split, verify
from reshard.strict_json import digest
from tests.checkpoints import build
from tests.conftest import Cli, Online, published, refused, together, tree, wait_for
from tests.hub_server import HubServer

REPO = "org/set"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Local sets, and what pulling from them gives; nothing changes them."""
    root = tmp_path_factory.mktemp("sets")
    source = open_checkpoint(build(root / "source"))
    split(build_plan(source, 4), root / "out")
    split(build_plan(source, 4), root / "unhashed", checksums=False)
    split(build_plan(source, 2), root / "halves")
    pull(root / "out", root / "ends", [0, 3])
    pull(root / "out", root / "all", [0, 1, 2, 3])
    before = tree(root)
    yield root
    assert tree(root) == before


@pytest.fixture
def repo(hub: HubServer, sets: Path) -> str:
    """A repository with the whole set."""
    hub.create(REPO, published(sets / "out"))
    return REPO


def fetched(hub: HubServer) -> list[str]:
    """The weight files that were asked for, as often as they were."""
    queries = [parse_qs(urlsplit(r.path).query) for r in hub.requests if r.origin == "blob"]
    names = [query["filename"][0] for query in queries]
    return sorted(name for name in names if name.endswith(".safetensors"))


def weight_bytes(hub: HubServer) -> int:
    """What came of weight files, however many requests it took."""
    answered = (r for r in hub.requests if r.status in (200, 206))
    return sum(r.sent for r in answered if r.path.endswith(".safetensors"))


def weights(directory: Path) -> dict[str, bytes]:
    return {path: data for path, data in tree(directory).items() if path.endswith(".safetensors")}


# --- the plain case -------------------------------------------------------------------------------


def test_one_stage_is_that_of_the_local_set(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    result = online("pull", repo, tmp_path / "dest", "--stage", 1, "--json", "--quiet")
    document = json.loads(result.out)
    assert (document["fetched"], document["present"], result.err) == (2, [1], "")
    expected = sets / "out/stage-01-of-04"
    assert tree(tmp_path / "dest") == tree(expected)
    assert fetched(hub) == [f"stage-01-of-04/{path}" for path in weights(expected)]
    assert weight_bytes(hub) == sum(map(len, weights(expected).values()))

    hub.forget()
    again = online("pull", repo, tmp_path / "dest", "--stage", 1)
    assert (again.code, "complete already" in again.out) == (0, True)
    assert not fetched(hub)


def test_stages_of_one_node(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    online("pull", repo, tmp_path / "both", "--stage", "0,3")
    assert tree(tmp_path / "both") == tree(sets / "ends")
    names = [Path(path).name for path in fetched(hub)]
    assert sorted(names) == list(weights(sets / "ends"))  # the embedding once

    hub.forget()
    online("pull", repo, tmp_path / "both", "--stage", "all")
    assert tree(tmp_path / "both") == tree(sets / "all")
    assert {path[:8] for path in fetched(hub)} == {"stage-01", "stage-02"}


def test_stages_one_after_the_other(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    online("pull", f"hf://{repo}", tmp_path / "dest", "--stage", 3)
    assert tree(tmp_path / "dest") == tree(sets / "out/stage-03-of-04")
    hub.forget()
    online("pull", f"{repo}@{hub.head(repo)}", tmp_path / "dest", "--stage", 0)
    assert tree(tmp_path / "dest") == tree(sets / "ends")
    own = weights(sets / "out/stage-00-of-04").keys() - weights(sets / "out/stage-03-of-04").keys()
    assert fetched(hub) == sorted(f"stage-00-of-04/{name}" for name in own)


def test_lost_file_alone_is_fetched_again(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "dest"
    pull(sets / "all", dest, [1])
    (dest / "model-layer-00002.safetensors").unlink()
    assert online("pull", repo, dest, "--stage", 1).code == 0
    assert tree(dest) == tree(sets / "out/stage-01-of-04")
    assert fetched(hub) == ["stage-01-of-04/model-layer-00002.safetensors"]


def test_set_without_checksums_is_checked_by_those_of_the_hub(
    hub: HubServer, online: Online, sets: Path, tmp_path: Path
) -> None:
    hub.create(REPO, published(sets / "unhashed"))
    hub.fail("GET", "/blobs/.*layer-00003", corrupt=True)
    refused(online("pull", REPO, tmp_path / "dest", "--stage", 1), "model-layer-00003", "sha256")
    assert online("pull", REPO, tmp_path / "dest", "--stage", 1).code == 0
    assert tree(tmp_path / "dest") == tree(sets / "out/stage-01-of-04")


def test_private_repository(hub: HubServer, online: Online, sets: Path, tmp_path: Path) -> None:
    hub.create(REPO, published(sets / "out"), private=True)
    dest = tmp_path / "dest"
    refused(online("pull", REPO, dest, "--stage", 1, HF_TOKEN=""), "hf auth login")
    assert online("pull", REPO, dest, "--stage", 1, HF_TOKEN="hf_readtoken").code == 0
    assert tree(dest) == tree(sets / "out/stage-01-of-04")


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "word"),
    [("corrupt", "sha256"), ("ignore_range", "range requests"), ("wrong_length", "asked for")],
)
def test_wrong_bytes_are_refused_and_then_fetched_anew(
    hub: HubServer,
    online: Online,
    repo: str,
    sets: Path,
    tmp_path: Path,
    fault: str,
    word: str,
) -> None:
    dest, expected = tmp_path / "dest", sets / "out/stage-01-of-04"
    faults: dict[str, Any] = {fault: True}
    hub.fail("GET", "/blobs/.*layer-00002", **faults)
    refused(online("pull", repo, dest, "--stage", 1), "model-layer-00002", word)
    assert not (dest / "reshard.json").exists()
    there = {path: data for path, data in weights(dest).items() if "/" not in path}
    assert there.items() <= weights(expected).items()
    assert online("pull", repo, dest, "--stage", 1).code == 0
    assert tree(dest) == tree(expected)


def test_what_breaks_off_is_continued(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    hub.fail("GET", "/blobs/.*layer-00000", cut_after=20_000)
    hub.fail("GET", "/resolve/.*layer-00001", cut_after=0)
    hub.fail("GET", "/blobs/.*visual", status=500)
    hub.fail("GET", "/blobs/.*embed", status=429, headers={"Retry-After": "0"})
    hub.fail("GET", "/tree/", status=503, headers={"Retry-After": "0"})
    hub.fail("GET", "/resolve/.*/config.json", status=502, headers={"Retry-After": "0"})
    result = online("pull", repo, tmp_path / "dest", "--stage", 0)
    assert result.code == 0, result.err
    assert tree(tmp_path / "dest") == tree(sets / "out/stage-00-of-04")
    assert "trying again" in result.err
    # What had come was not asked for again.
    assert weight_bytes(hub) == sum(map(len, weights(tmp_path / "dest").values()))


@pytest.mark.parametrize("name", ["reshard.json", "tokenizer.json"])
def test_damaged_small_file_is_refused(
    hub: HubServer, online: Online, repo: str, tmp_path: Path, name: str
) -> None:
    hub.fail("GET", rf"/(resolve|blobs)/.*{name}$", skip=name == "reshard.json", corrupt=True)
    refused(online("pull", repo, tmp_path / "dest", "--stage", 1), name, "what came is not")
    assert not (tmp_path / "dest").exists()


def test_killed_pull_continues(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "dest"
    pull(sets / "all", dest, [3])
    journal = dest / ".reshard-partial" / "journal"
    hub.fail("GET", "/blobs/.*layer-00001", delay=3)
    process = online.start("pull", repo, dest, "--stage", 0)
    wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (dest / "model-layer-00001.safetensors").exists()
    # What was there before is complete as it was.
    assert json.loads((dest / "reshard.json").read_bytes())["present"] == [3]

    hub.forget()
    assert online("pull", repo, dest, "--stage", 0).code == 0
    assert tree(dest) == tree(sets / "ends")
    assert set(fetched(hub)) == {"stage-00-of-04/model-layer-00001.safetensors"}


# --- what is refused ------------------------------------------------------------------------------


def test_repositories_that_are_not_what_they_say(
    hub: HubServer, online: Online, sets: Path, tmp_path: Path
) -> None:
    layer = "stage-01-of-04/model-layer-00002.safetensors"
    whole = published(sets / "out")
    flipped = whole[layer][:-1] + bytes([whole[layer][-1] ^ 1])
    stage_1 = {path: data for path, data in whole.items() if not path.startswith("stage-00")}
    stage_1["reshard.json"] = whole["stage-01-of-04/reshard.json"]
    repositories = {
        "missing": {path: data for path, data in whole.items() if path != layer},
        "size": {**whole, layer: whole[layer] + b"\0"},
        "sha256": {**whole, layer: flipped},
        "side": {path: data for path, data in whole.items() if path != "vocab.json"},
        "none": {path: data for path, data in whole.items() if path != "reshard.json"},
        "absent": stage_1,
    }
    for name, files in repositories.items():
        hub.create(f"org/{name}", files)
    words = {
        "missing": (layer, "missing", "push this stage again"),
        "size": (layer, "not of the size in the manifest"),
        "sha256": (layer, "its published sha256 is"),
        "side": ("vocab.json", "is missing or was changed"),
        "none": ("org/none", "is not a bundle: it has no reshard.json"),
        "absent": ("stages 0 are not in org/absent@", "it has 1"),
        "nobody": ("no such repository",),
    }
    stage = {name: 0 if name == "absent" else 1 for name in words}
    commands = [("pull", f"org/{n}", tmp_path / n, "--stage", stage[n]) for n in words]
    for name, result in zip(words, together(online, *commands), strict=True):
        refused(result, *words[name])
        assert not (tmp_path / name).exists()
    assert not fetched(hub)


def test_another_set_in_the_destination(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "dest"
    pull(sets / "halves", dest, [0])
    before = tree(dest)
    refused(
        online("pull", repo, dest, "--stage", 1),
        "holds stages of another set; it differs in partition, stages",
    )
    assert tree(dest) == before
    assert not fetched(hub)


def resealed(document: dict[str, Any]) -> bytes:
    """A manifest with the set_id of its content, as docs/bundle-format.md tells to compute it."""
    identity = copy.deepcopy(document)
    for key in ("set_id", "tool_version", "present", "local"):
        identity.pop(key, None)
    del identity["source"]["directory"], identity["source"]["license"]
    for stage in identity["stages"]:
        for file in stage["files"]:
            del file["sha256"]
    return json.dumps({**document, "set_id": digest(identity)}).encode()


def test_hostile_manifests(hub: HubServer, online: Online, sets: Path, tmp_path: Path) -> None:
    whole = published(sets / "out")
    good = json.loads(whole["reshard.json"])
    assert json.loads(resealed(good)) == good

    def with_side(name: str) -> bytes:
        document = copy.deepcopy(good)
        document["side_files"][0]["name"] = name
        return resealed(document)

    def with_weight(name: str) -> bytes:
        document = copy.deepcopy(good)
        document["stages"][1]["files"][0]["name"] = name
        return resealed(document)

    side, weight = "not an acceptable side file name", "not the name of a bundle's weight file"
    manifests = {
        "a": (with_side("../evil"), side),
        "c": (with_side("reshard.json"), side),
        "e": (with_weight("../model-layer-00002.safetensors"), weight),
        "f": (with_weight("model-layer-00002.safetensors/../evil"), weight),
        "g": (json.dumps({**good, "set_id": "0" * 64}).encode(), "set_id"),
        "i": (b"[" * 100_000, "reshard.json"),
    }
    for name, (manifest, _) in manifests.items():
        hub.create(f"org/{name}", {**whole, "reshard.json": manifest})
    commands = [("pull", f"org/{n}", tmp_path / "dests" / n, "--stage", "1") for n in manifests]
    for (_, word), result in zip(manifests.values(), together(online, *commands), strict=True):
        assert (result.code, "Traceback" in result.err) == (1, False), result.err
        assert word in result.err
    assert not (tmp_path / "dests").exists()
    assert not fetched(hub)


# --- other tools, and without a network -----------------------------------------------------------


def hf(hub: HubServer, home: Path, *arguments: object) -> None:
    """Run the command line of huggingface_hub."""
    command = [str(Path(sys.executable).parent / "hf"), *map(str, arguments)]
    subprocess.run(command, env=hub.environment(home), check=True, capture_output=True)


def test_stage_fetched_with_hf_is_a_model_directory(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path, cli: Cli
) -> None:
    to = tmp_path / "to"
    hf(hub, online.home, "download", repo, "--include", "stage-02-of-04/*", "--local-dir", to)
    stage = to / "stage-02-of-04"
    assert tree(stage) == tree(sets / "out/stage-02-of-04")
    assert cli("verify", stage).code == 0
    index = json.loads((stage / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"].values()) == set(weights(stage))
    for path in weights(stage):
        with safetensors.safe_open(stage / path, framework="pt") as file:
            assert set(file.keys()) == {n for n, f in index["weight_map"].items() if f == path}


def test_pull_from_the_cache_without_a_network(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "dest"
    refused(online("pull", repo, dest, "--stage", 1, HF_HUB_OFFLINE="1"), "offline mode is on")
    hf(hub, online.home, "download", repo)
    hub.forget()
    cached = {path.stat().st_ino for path in online.home.rglob("blobs/*")}
    result = online("pull", repo, dest, "--stage", "0,3", HF_HUB_OFFLINE="1", HF_TOKEN="")
    assert result.code == 0, result.err
    assert tree(dest) == tree(sets / "ends")
    assert not hub.requests
    for path in dest.iterdir():
        assert not path.is_symlink()
        assert path.stat().st_ino not in cached
    assert verify(dest).ok


def test_what_the_cache_has_is_not_fetched(
    hub: HubServer, online: Online, repo: str, sets: Path, tmp_path: Path
) -> None:
    hf(hub, online.home, "download", repo, "stage-01-of-04/model-layer-00002.safetensors")
    hub.forget()
    assert online("pull", repo, tmp_path / "dest", "--stage", 1).code == 0
    assert tree(tmp_path / "dest") == tree(sets / "out/stage-01-of-04")
    assert fetched(hub) == ["stage-01-of-04/model-layer-00003.safetensors"]
