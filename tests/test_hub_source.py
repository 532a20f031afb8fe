"""Reading checkpoints and sets from the Hub: the right bytes, only those, whatever goes wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from reshard import build_plan, open_checkpoint, split
from reshard.manifest import Manifest
from reshard.names import natural_key
from tests.checkpoints import build, read_dir, write_tensors
from tests.conftest import Cli, Online, Result, refused, tree
from tests.hub_server import Content, HubServer

REPO = "org/model"
PROBE = 16 << 10
HEADER = 26 << 10
"""More than the header of `in_order` takes, less than what is before its first layer."""

WAITING = "trying again in"

# A request that is answered so leaves the process waiting, until it is killed.
STUCK: dict[str, Any] = {"status": 503, "headers": {"Retry-After": "500"}}
AGAIN: dict[str, Any] = {"status": 503, "headers": {"Retry-After": "0"}}
WEIGHTS = r"/blobs/.*\.safetensors$"


def divide(source: Path, out: Path, pp_size: int) -> Path:
    split(build_plan(open_checkpoint(source), pp_size), out)
    return out


def in_order(path: Path, **options: Any) -> Path:
    """A checkpoint in one shard that has its layers one after the other, as releases mostly do."""
    build(path, shards=1, index=False, **options)
    tensors = read_dir(path)
    write_tensors(
        path / "model.safetensors",
        {name: tensors[name] for name in sorted(tensors, key=natural_key)},
    )
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints, and what splits of them on this machine give; no test changes them."""
    root = tmp_path_factory.mktemp("models")
    divide(build(root / "source"), root / "out", 4)
    divide(build(root / "other", seed=1), root / "other-out", 4)
    divide(in_order(root / "ordered"), root / "ordered-out", 2)
    build(root / "small", layers=2, experts=2, shards=2)
    divide(root / "small", root / "small-out", 2)
    yield root


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tensor of 26 MB."""
    path = tmp_path_factory.mktemp("large") / "source"
    return in_order(path, vocab_size=400_000, layers=2, experts=2, tied=True, text_only=True)


HEADERS, PIECES = 2, 13
"""Requests for `in_order`: its header is longer than the first read, its head two pieces."""


def files(directory: Path) -> dict[str, Content]:
    """What a repository holds that a directory was uploaded to."""
    return {str(p.relative_to(directory)): p for p in directory.rglob("*") if p.is_file()}


def content(out: Path) -> dict[str, bytes]:
    """All that does not depend on where the checkpoint lay."""
    return {path: data for path, data in tree(out).items() if not path.endswith("reshard.json")}


def manifest(out: Path) -> dict[str, Any]:
    document = json.loads((out / "reshard.json").read_bytes())
    assert isinstance(document, dict)
    return document


def requested(hub: HubServer) -> list[str]:
    """The files that were asked for, each once, without what leads to them."""
    paths = (urlsplit(r.path) for r in hub.requests if r.method == "GET")
    found = [re.search(r"/resolve/[^/]+/(.+)", path.path) for path in paths]
    return sorted({match[1] for match in found if match})


def served(hub: HubServer) -> dict[str, list[tuple[int, int]]]:
    """The ranges of weight files that were sent, in the order of their bytes."""
    ranges = defaultdict(list)
    for request in hub.requests:
        if request.origin == "blob" and request.status in (200, 206) and request.sent:
            [name] = parse_qs(urlsplit(request.path).query)["filename"]
            begin = int(re.findall(r"\d+", request.range or "0")[0])
            if name.endswith(".safetensors"):
                ranges[name].append((begin, begin + request.sent))
    return {name: sorted(found) for name, found in ranges.items()}


def nbytes(ranges: Mapping[str, Sequence[tuple[int, int]]]) -> int:
    return sum(end - begin for found in ranges.values() for begin, end in found)


def overlap(
    a: Mapping[str, Sequence[tuple[int, int]]], b: Mapping[str, Sequence[tuple[int, int]]]
) -> int:
    """How many bytes of the one are bytes of the other."""
    return sum(
        max(0, min(end, other_end) - max(begin, other_begin))
        for name, found in a.items()
        for begin, end in found
        for other_begin, other_end in b.get(name, ())
    )


def twice(ranges: Mapping[str, Sequence[tuple[int, int]]]) -> int:
    """How many bytes were sent more than once."""
    found = 0
    for parts in ranges.values():
        arrived = 0
        for begin, end in sorted(parts):
            found += max(0, min(end, arrived) - begin)
            arrived = max(arrived, end)
    return found


def without_headers(
    ranges: Mapping[str, Sequence[tuple[int, int]]], length: int
) -> dict[str, list[tuple[int, int]]]:
    return {
        name: [(max(begin, length), end) for begin, end in found if end > length]
        for name, found in ranges.items()
    }


def results_of(
    online: Online, commands: Mapping[str, Sequence[object]], **variables: str | None
) -> dict[str, Result]:
    """The results of commands that have nothing to do with each other, by the same keys."""
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda command: online(*command, **variables), commands.values())
        return dict(zip(commands, results, strict=True))


def until_stuck(hub: HubServer, process: subprocess.Popen[str], connections: int = 1) -> None:
    """Returns when so many connections of a process have been told to wait."""
    end = time.monotonic() + 30
    while sum(r.status in (429, 503) for r in hub.requests) < connections:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


def stop(process: subprocess.Popen[str], number: int) -> str:
    """End a process by a signal; what it says then."""
    process.send_signal(number)
    return process.communicate(timeout=20)[1]


def assert_unfinished(out: Path, whole: Path) -> None:
    """Nothing that is there under a final name is half or wrong, and there is no manifest."""
    assert not (out / "reshard.json").exists()
    expected = tree(whole)
    for path, data in (tree(out) if out.exists() else {}).items():
        assert ".reshard-partial/" in path or data == expected[path], path


# --- names and revisions --------------------------------------------------------------------------


def test_revision_is_pinned_and_recorded(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    first = hub.create(REPO, files(models / "other"))
    refs = hub.repositories[REPO].refs
    refs |= {"refs/tags/v1": first, "refs/pr/1": first, "refs/heads/dev": first}
    second = hub.commit(REPO, files(models / "source"))
    wanted = {
        REPO: second,
        f"hf://{REPO}": second,
        f"{REPO}@{second}": second,
        f"{REPO}@v1": first,
        f"{REPO}@refs/pr/1": first,
        f"hf://{REPO}@dev": first,
        f"{REPO}@{first}": first,
    }
    outs = {name: tmp_path / str(number) for number, name in enumerate(wanted)}
    stage = ["--pp-size", 4, "--stage", 1]
    commands = {name: ["split", name, out, *stage] for name, out in outs.items()}
    results = results_of(online, commands)
    for name, commit in wanted.items():
        assert results[name].code == 0, results[name].err
        source = manifest(outs[name])["source"]
        assert (source["repo"], source["commit"], source["directory"]) == (REPO, commit, None)
        local = models / ("out" if commit == second else "other-out")
        stage_1 = "stage-01-of-04"
        assert content(outs[name] / stage_1) == content(local / stage_1)
    assert tree(outs[REPO]) == tree(outs[f"hf://{REPO}"])


def test_commit_of_somebody_else_during_a_split_changes_nothing(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    first = hub.create(REPO, files(models / "source"))
    hub.fail("GET", "config.json", status=503, headers={"Retry-After": "1"})
    hub.fail("GET", WEIGHTS, skip=20, times=8, delay=0.2)
    process = online.start("split", REPO, tmp_path / "out", "--pp-size", 4)
    until_stuck(hub, process)
    hub.commit(REPO, files(models / "other"), delete=["LICENSE"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert content(tmp_path / "out") == content(models / "out")
    assert manifest(tmp_path / "out")["source"]["commit"] == first


def test_what_exists_is_a_path_unless_it_says_hf(
    hub: HubServer,
    online: Online,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.create(REPO, files(models / "source"))
    build(tmp_path / REPO, "qwen3_vl_moe")
    monkeypatch.chdir(tmp_path)
    here = online("inspect", REPO, "--json")
    assert not hub.requests
    there = online("inspect", f"hf://{REPO}", "--json")
    types = [json.loads(result.out)["model_type"] for result in (here, there)]
    assert types == ["qwen3_vl_moe", "qwen3_5_moe"]


def test_names_of_nothing(hub: HubServer, online: Online) -> None:
    hub.create(REPO, {"config.json": b"{}"})
    expected = {
        "org/missing": (1, "has no such repository, or hides it from you"),
        f"{REPO}@missing": (1, "has no such revision"),
        f"{REPO}@refs/pr/7": (1, "has no such revision"),
        "hf://model": (2, "is not a repository"),
        f"hf://{REPO}/config.json": (2, "is not a repository"),
        f"{REPO}/config.json": (1, "no such directory"),
        "org/a--b..c": (2, "cannot be the name of a repository"),
    }
    results = results_of(online, {name: ["plan", name, "--pp-size", 2] for name in expected})
    for name, (code, words) in expected.items():
        assert results[name].code == code, name
        assert words in results[name].err, name
        assert "\nhint: " in results[name].err or code == 2, name
        assert "Traceback" not in results[name].err, name


# --- only what is needed --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["plan", "--pp-size", "4"], ["inspect"]])
def test_headers_are_enough(
    hub: HubServer, online: Online, cli: Cli, tmp_path: Path, command: list[str]
) -> None:
    source = build(tmp_path / "source", weights="fp8")  # headers longer than the first read
    hub.create(REPO, files(source))
    result = online(*command, REPO, "--json")
    assert result.code == 0, result.err
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert requested(hub) == ["config.json", *shards, "model.safetensors.index.json"]
    for name, ranges in served(hub).items():
        length = 8 + int.from_bytes((source / name).read_bytes()[:8], "little")
        assert length > PROBE
        assert ranges == [(0, PROBE), (PROBE, length)]
    remote, local = (json.loads(r.out) for r in (result, cli(*command, source, "--json")))
    for document in (remote, local):
        origin = document if command == ["inspect"] else document["source"]
        for key in ("source", "repo", "commit"):
            origin.pop(key, None)
    assert remote == local


def test_one_stage_takes_its_own_bytes_only(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "source"))
    result = online("split", REPO, tmp_path / "out", "--pp-size", 4, "--stage", 2, "--json")
    document = json.loads(result.out)
    assert (document["fetched"], document["present"]) == (2, [2])
    assert content(tmp_path / "out/stage-02-of-04") == content(models / "out/stage-02-of-04")

    stages = build_plan(open_checkpoint(models / "source"), 4).stages
    wanted = defaultdict(list)
    for file in stages[2].files:
        for tensor in file.tensors:
            wanted[tensor.file].append((tensor.begin, tensor.end))
    ranges = served(hub)
    spare = nbytes(wanted) // 256  # gaps that save a request, and may belong to another file
    assert twice(ranges) <= spare
    for shard, found in ranges.items():
        missing = nbytes({shard: wanted[shard]}) - overlap({shard: found}, wanted)
        assert missing <= 0, shard
        needless = nbytes({shard: found}) - overlap({shard: found}, wanted)
        assert needless <= PROBE + spare, shard
        assert nbytes({shard: found}) < (models / "source" / shard).stat().st_size, shard
    assert "README.md" in requested(hub)
    assert ".gitattributes" not in requested(hub)


def test_a_layer_is_one_request_where_it_lies_in_one_piece(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "ordered"))
    online("split", REPO, tmp_path / "out", "--pp-size", 2)
    assert content(tmp_path / "out") == content(models / "ordered-out")
    ranges = served(hub)
    assert twice(ranges) == 0
    assert len(ranges["model.safetensors"]) == HEADERS + PIECES
    assert nbytes(ranges) == (models / "ordered/model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5_moe", {"weights": "fp8", "tied": True}),
        ("qwen3_vl_moe", {}),
        ("qwen3_5_moe", {"index": False, "shards": 3}),
    ],
)
def test_the_same_files_as_from_a_local_directory(
    hub: HubServer, online: Online, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    source = build(tmp_path / "source", family, **options)
    local = divide(source, tmp_path / "local", 2)
    hub.create(REPO, files(source))
    result = online("split", REPO, tmp_path / "out", "--pp-size", 2)
    assert result.code == 0, result.err
    assert content(tmp_path / "out") == content(local)
    assert manifest(tmp_path / "out")["stages"] == manifest(local)["stages"]
    ranges, size = served(hub), sum(p.stat().st_size for p in source.glob("*.safetensors"))
    assert twice(ranges) <= size // 256
    assert nbytes(ranges) <= size * 257 // 256


def test_many_pages_of_files(hub: HubServer, online: Online, models: Path, tmp_path: Path) -> None:
    hub.page_size = 3
    hub.create(REPO, files(models / "small"))
    assert online("split", REPO, tmp_path / "out", "--pp-size", 2).code == 0
    assert content(tmp_path / "out") == content(models / "small-out")


# --- the cache ------------------------------------------------------------------------------------


def download(online: Online, *patterns: str) -> Path:
    """Have huggingface_hub download a repository, or what matches; returns the snapshot."""
    code = (
        "import sys; from huggingface_hub import snapshot_download;"
        "print(snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:] or None))"
    )
    environment = os.environ | online.hub.environment(online.home)
    command = [sys.executable, "-c", code, REPO, *patterns]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    online.hub.forget()
    return Path(done.stdout.strip())


def test_cached_snapshot_is_used_and_gives_the_same_set(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "source"))
    plan = ["--pp-size", 4]
    online("split", REPO, tmp_path / "ranges", *plan)
    assert content(tmp_path / "ranges") == content(models / "out")
    snapshot = download(online)

    assert online("split", REPO, tmp_path / "cached", *plan).code == 0
    assert requested(hub) == []
    assert tree(tmp_path / "cached") == tree(tmp_path / "ranges")
    # One set: a run from the cache has nothing to add to one by ranges.
    again = online("split", REPO, tmp_path / "ranges", *plan)
    assert (again.code, "complete already" in again.out) == (0, True)

    hub.forget()
    offline = online("split", REPO, tmp_path / "offline", *plan, HF_HUB_OFFLINE="1")
    assert offline.code == 0, offline.err
    assert re.search(f"^note: .*offline.*; taking {snapshot}", offline.err, re.MULTILINE)
    assert hub.requests == []
    assert tree(tmp_path / "offline") == tree(tmp_path / "ranges")

    hub.close()
    commands = {key: ["split", REPO, tmp_path / key, *plan] for key in ("unreachable", "alone")}
    alone = online.start(*commands["alone"], HF_HOME=str(tmp_path / "empty-cache"))
    unreachable = online(*commands["unreachable"])
    assert unreachable.code == 0, unreachable.err
    assert re.search(f"^note: .*cannot.*reach.*; taking {snapshot}", unreachable.err, re.MULTILINE)
    assert tree(tmp_path / "unreachable") == tree(tmp_path / "ranges")
    out, err = alone.communicate(timeout=60)
    refused(
        Result(alone.returncode, out, err), f"{REPO}: cannot reach {hub.endpoint}", "HF_ENDPOINT"
    )
    assert not (tmp_path / "alone").exists()


def test_only_what_the_cache_lacks_is_requested(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "source"))
    download(online, "*.json", "*-00001-of-*", "*-00003-of-*")
    assert online("split", REPO, tmp_path / "out", "--pp-size", 4).code == 0
    shards = sorted(path.name for path in (models / "source").glob("*.safetensors"))
    asked = requested(hub)
    assert [name for name in asked if name.endswith(".safetensors")] == [shards[1], shards[3]]
    assert not [name for name in asked if name.endswith(".json")]
    assert content(tmp_path / "out") == content(models / "out")
    offline = online("split", REPO, tmp_path / "b", "--pp-size", 4, HF_HUB_OFFLINE="1")
    refused(offline, "2 weight files of the checkpoint are missing", shards[1], shards[3])
    assert not (tmp_path / "b").exists()


def test_cached_file_of_another_size_is_not_used(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "source"))
    snapshot = download(online)
    [shard, *_] = sorted(snapshot.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    os.truncate(snapshot / "config.json", 3)
    assert online("split", REPO, tmp_path / "out", "--pp-size", 4).code == 0
    assert requested(hub) == ["config.json", shard.name]
    assert content(tmp_path / "out") == content(models / "out")


def test_cache_of_an_older_commit_is_not_used(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    first = hub.create(REPO, files(models / "source"))
    download(online)
    second = hub.commit(REPO, files(models / "other"))
    names = {"new": REPO, "old": f"{REPO}@{first}"}
    out = {key: ["split", name, tmp_path / key, "--pp-size", 4] for key, name in names.items()}
    results_of(online, out)
    assert manifest(tmp_path / "new")["source"]["commit"] == second
    assert content(tmp_path / "new") == content(models / "other-out")
    assert content(tmp_path / "old") == content(models / "out")


def test_offline_without_a_cache(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "small"))
    result = online("split", REPO, tmp_path / "out", "--pp-size", 2, HF_HUB_OFFLINE="1")
    refused(result, f"{REPO}: offline mode is on", "HF_HUB_OFFLINE", "the cache does not have it")
    assert hub.requests == []
    assert not (tmp_path / "out").exists()


# --- one stage after the other --------------------------------------------------------------------


def test_stage_by_stage_is_the_same_as_all_at_once(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "ordered"))
    online("split", REPO, tmp_path / "once", "--pp-size", 2)
    hub.forget()
    first = online("split", REPO, tmp_path / "steps", "--pp-size", 2, "--stage", 0)
    ranges = served(hub)
    hub.forget()
    second = online("split", REPO, tmp_path / "steps", "--pp-size", 2, "--stage", 1)
    assert (first.code, second.code) == (0, 0), second.err
    assert tree(tmp_path / "steps") == tree(tmp_path / "once")
    # The embedding of stage 0 is that of stage 1 too; what is here is not fetched again.
    assert overlap(without_headers(ranges, HEADER), without_headers(served(hub), HEADER)) == 0


@pytest.mark.parametrize("changed", ["tokenizer.json", "weights"])
def test_stage_of_another_commit_is_not_added(
    hub: HubServer, online: Online, models: Path, tmp_path: Path, changed: str
) -> None:
    first = hub.create(REPO, files(models / "source"))
    online("split", REPO, tmp_path / "out", "--pp-size", 4, "--stage", "0-1")
    before = tree(tmp_path / "out")
    changes = files(models / "other") if changed == "weights" else {changed: b"{}"}
    hub.commit(REPO, changes)
    rest = ["--pp-size", 4, "--stage", "2-3"]
    result = online("split", REPO, tmp_path / "out", *rest)
    refused(result, "holds another set; it differs in source", f"{REPO}@{first}")
    assert tree(tmp_path / "out") == before
    assert online("split", f"{REPO}@{first}", tmp_path / "out", *rest).code == 0
    assert content(tmp_path / "out") == content(models / "out")


# --- verify ---------------------------------------------------------------------------------------


def test_verify_against_a_repository(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "ordered"))
    out = tmp_path / "out"
    shutil.copytree(models / "ordered-out", out)
    equal = online("verify", out, "--source", REPO)
    assert equal.code == 0, equal.err
    assert "equal to the source" in equal.out
    replicas = 1  # of the embedding, which has been compared before
    assert len(served(hub)["model.safetensors"]) <= HEADERS + PIECES + replicas

    file = out / "stage-01-of-02/model-layer-00006.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    [*_, last] = (
        open_checkpoint(models / "ordered-out")
        .bundle.header(  # type: ignore[union-attr]
            "stage-01-of-02/model-layer-00006.safetensors",
            Manifest.parse((out / "reshard.json").read_bytes(), "").files()[file.name],
        )
        .tensors
    )
    different = online("verify", out, "--source", REPO, "--json")
    assert different.code == 1
    problems = {p["problem"] for p in json.loads(different.out)["problems"]}
    assert f"{last.name}: bytes differ" in problems
    assert len(problems) == 2  # and the sha256


# --- the network ----------------------------------------------------------------------------------


def test_slow_and_cut_replies_of_many_connections(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "source"))
    hub.fail("GET", WEIGHTS, skip=8, times=8, delay=0.05)
    hub.fail("GET", WEIGHTS, skip=30, times=4, cut_after=5)
    result = online("split", REPO, tmp_path / "out", "--pp-size", 4)
    assert result.code == 0, result.err
    assert content(tmp_path / "out") == content(models / "out")
    assert twice(served(hub)) <= nbytes(served(hub)) // 256


DATA = {"pattern": WEIGHTS, "skip": HEADERS + 1}
REFUSALS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "403": ({"pattern": "/resolve/.*safetensors", "skip": 3, "status": 403}, ["permission"]),
    "401": ({"pattern": "/resolve/.*safetensors", "status": 401}, ["the token is not valid"]),
    "404": (
        {
            "pattern": "/resolve/.*safetensors",
            "status": 404,
            "headers": {"X-Error-Code": "EntryNotFound"},
        },
        ["the repository has no such file"],
    ),
    "429 for good": (
        {**DATA, "times": 6, "status": 429, "headers": {"Retry-After": "0"}},
        ["too many requests", "wait some minutes", "a token raises the limit"],
    ),
    "429 for very long": (
        {**DATA, "status": 429, "headers": {"Retry-After": "10000"}},
        ["too many requests"],
    ),
    "503 for good": ({**DATA, "times": 6, **AGAIN}, ["the Hub answers 503"]),
    "range ignored": (
        {**DATA, "ignore_range": True},
        ["asked for bytes ", "the server answered 200", "proxy"],
    ),
    "wrong length": ({**DATA, "wrong_length": True}, ["asked for bytes ", "answered 206 with"]),
    "wrong range": (
        {**DATA, "headers": {"Content-Range": "bytes 0-7/8"}},
        ["asked for bytes ", "answered 206 with bytes 0-7/8"],
    ),
    "corrupted header": ({"pattern": WEIGHTS, "corrupt": True}, ["model.safetensors: header"]),
    "corrupted config": (
        {"pattern": "/config.json", "corrupt": True},
        ["config.json: what came is not the file that the repository lists"],
    ),
    "corrupted side file": (
        {"pattern": "/tokenizer.json", "corrupt": True},
        ["tokenizer.json: what came is not the file that the repository lists"],
    ),
    "shortened side file": ({"pattern": "/vocab.json", "wrong_length": True}, ["vocab.json"]),
}


RETRIED: dict[str, list[dict[str, Any]]] = {
    "every request": [
        *({"pattern": path, **AGAIN} for path in (f"models/{REPO}$", "/tree/", "/config.json")),
        *({"pattern": path, **AGAIN} for path in (WEIGHTS, "/README.md", "/tokenizer.json")),
        *(
            {"pattern": WEIGHTS, "skip": 3 + n, "status": status, "headers": {"Retry-After": "0"}}
            for n, status in enumerate((408, 429, 500, 502, 503, 504))
        ),
    ],
    "asked to wait": [
        {"pattern": WEIGHTS, "skip": 3, "status": 429, "headers": headers}
        for headers in (
            {"Retry-After": "1"},
            {"RateLimit": '"api";r=0;t=2', "Retry-After": "400"},
        )
    ],
    "two reasons": [
        {"pattern": "/config.json", **AGAIN},
        {"pattern": "/config.json", "status": 429, "headers": {"Retry-After": "1"}},
    ],
    "cut": [
        {"pattern": "/blobs/", "cut_after": 1000},  # in the header
        {"pattern": "/blobs/", "skip": 3, "times": 2, "cut_after": 3000},
    ],
}


class Trial(NamedTuple):
    """A command that meets faults, and is repeated; `between` is what the first run leaves."""

    hub: HubServer
    first: Result
    between: Path
    again: Result
    out: Path


@pytest.fixture(scope="module")
def trials(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trial]:
    """All at once, each with a Hub of its own, since there are many."""

    def run(faults: Sequence[Mapping[str, Any]]) -> Trial:
        root = tmp_path_factory.mktemp("trial")
        out, between = root / "out", root / "between"
        with HubServer(root / "hub") as hub:
            hub.create(REPO, files(models / "ordered"))
            for fault in faults:
                hub.fail("GET", **fault)
            online = Online(hub, root / "hf-home")
            command = ["split", REPO, out, "--pp-size", 2, "--jobs", 1]
            first = again = online(*command)
            if first.code:
                if out.exists():
                    shutil.copytree(out, between)
                again = online(*command)
            return Trial(hub, first, between, again, out)

    wanted = RETRIED | {name: [fault] for name, (fault, _) in REFUSALS.items()}
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(wanted, pool.map(run, wanted.values()), strict=True))


@pytest.mark.parametrize("name", REFUSALS)
def test_failure_leaves_nothing_wrong_and_the_same_command_finishes(
    models: Path, trials: Mapping[str, Trial], name: str
) -> None:
    _, first, between, again, out = trials[name]
    words = REFUSALS[name][1]
    refused(first, *words, hint=name not in ("404", "corrupted header"))
    assert_unfinished(between, models / "ordered-out")
    assert again.code == 0, again.err
    assert content(out) == content(models / "ordered-out")
    assert not (out / ".reshard-partial").exists()


@pytest.mark.parametrize("name", RETRIED)
def test_what_passes_is_overcome(models: Path, trials: Mapping[str, Trial], name: str) -> None:
    hub, first, _, _, out = trials[name]
    assert first.code == 0, first.err
    assert content(out) == content(models / "ordered-out")
    faults = sum(fault.get("times", 1) for fault in RETRIED[name])
    assert sum(r.status >= 400 for r in hub.requests) == (0 if name == "cut" else faults)


def test_it_waits_as_long_as_the_hub_asks(trials: Mapping[str, Trial]) -> None:
    told = trials["asked to wait"].first.err
    assert f"the Hub answers 429; {WAITING} 1 s" in told
    assert f"the Hub answers 429; {WAITING} 2 s" in told


def test_every_other_reason_and_length_of_waiting_is_told(trials: Mapping[str, Trial]) -> None:
    """A short wait is no reason to be silent about the long one that follows at once."""
    told = trials["two reasons"].first.err
    assert f"the Hub answers 503; {WAITING} 0 s" in told
    assert f"the Hub answers 429; {WAITING} 1 s" in told


def test_what_was_received_before_a_cut_is_not_fetched_again(
    models: Path, trials: Mapping[str, Trial]
) -> None:
    ranges = served(trials["cut"].hub)
    assert twice(ranges) == 0
    assert [end - begin for begin, end in ranges["model.safetensors"]].count(3000) == 2
    assert nbytes(ranges) == (models / "ordered/model.safetensors").stat().st_size


def test_one_failure_ends_the_waits_of_other_connections(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "source"))
    hub.fail("GET", WEIGHTS, skip=6, **STUCK)
    hub.fail("GET", WEIGHTS, skip=20, status=403)
    process = online.start("split", REPO, tmp_path / "out", "--pp-size", 4)
    out, err = process.communicate(timeout=30)
    refused(Result(process.returncode, out, err), "permission refused")


def test_one_failure_ends_the_waits_for_other_headers(
    hub: HubServer, online: Online, models: Path
) -> None:
    hub.create(REPO, files(models / "source"))
    hub.fail("GET", r"00002-of-00004\.safetensors$", **STUCK)
    hub.fail("GET", r"/resolve/.*00003-of-00004\.safetensors", status=403)
    process = online.start("plan", REPO, "--pp-size", 4)
    out, err = process.communicate(timeout=20)
    refused(Result(process.returncode, out, err), "permission refused")


def test_disk_that_fills_up_on_the_way(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2000k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        hub.create(REPO, files(models / "ordered"))
        hub.fail("GET", WEIGHTS, skip=6, status=503, headers={"Retry-After": "1"})
        split = ["split", REPO, disk / "out", "--pp-size", 2, "--jobs", 1]
        process = online.start(*split)
        until_stuck(hub, process)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        with (disk / "something-else").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - HEADER)
        out, err = process.communicate(timeout=60)
        refused(Result(process.returncode, out, err), "No space left on device", "free some space")
        assert_unfinished(disk / "out", models / "ordered-out")
        (disk / "something-else").unlink()
        assert online(*split).code == 0
        assert content(disk / "out") == content(models / "ordered-out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- tokens ---------------------------------------------------------------------------------------


MAY_READ = ("private with hf_readtoken", "open with ")
MAY_NOT_READ = {
    "private with ": ["has no such repository, or hides it", "log in with hf auth login"],
    "private with hf_stranger": ["has no such repository, or hides it", "private repository"],
    "open with hf_invalid": ["the token is not valid", "HF_TOKEN"],
    "gated with ": ["access is gated", "ask for it at "],
    "gated with hf_readtoken": ["access is gated", "ask for it at "],
}


def test_who_may_read(hub: HubServer, online: Online, models: Path, tmp_path: Path) -> None:
    hub.tokens["hf_stranger"] = "none"
    hub.create("org/open", files(models / "small"))
    hub.create("org/private", files(models / "small"), private=True)
    hub.create("org/gated", files(models / "small"), gated=True)

    def run(case: str) -> Result:
        repo, token = case.split(" with ")
        out = tmp_path / case
        return online("split", f"org/{repo}", out, "--pp-size", 2, HF_TOKEN=token)

    with ThreadPoolExecutor(4) as pool:
        cases = [*MAY_READ, *MAY_NOT_READ]
        results = dict(zip(cases, pool.map(run, cases), strict=True))
    for case in MAY_READ:
        assert results[case].code == 0, results[case].err
        assert content(tmp_path / case) == content(models / "small-out")
    for case, words in MAY_NOT_READ.items():
        refused(results[case], *words)
        assert not (tmp_path / case).exists()


@pytest.mark.parametrize(("token", "debug"), [("hf_writetoken", "0"), ("some.other/secret", "1")])
def test_no_token_is_shown(
    hub: HubServer, online: Online, models: Path, tmp_path: Path, token: str, debug: str
) -> None:
    hub.tokens[token] = "write"
    faults: dict[str, dict[str, Any]] = {
        "pin": {"pattern": "/api/models/org/pin", "status": 403},
        "server": {"pattern": "/api/models/org/server", "status": 500, "times": 3},
        "header": {"pattern": "org/header/resolve/.*safetensors", "status": 401},
        "storage": {"pattern": r"/blobs/.*=model\.safetensors$", "skip": 3, "status": 403},
    }
    headers = {"X-Error-Message": f"token {token} is bad, hf_another too", "Retry-After": "0"}
    for name, fault in faults.items():
        hub.create(f"org/{name}", files(models / ("ordered" if name == "storage" else "small")))
        hub.fail("GET", **fault, headers=headers)
    commands = {name: ["split", f"org/{name}", tmp_path / name, "--pp-size", 2] for name in faults}
    results = results_of(online, commands, HF_TOKEN=token, RESHARD_DEBUG=debug)
    for name, result in results.items():
        assert result.code == 1, name
        assert ("is bad" in result.err) == (name != "header"), name
        for secret in (token, token.removeprefix("hf_"), "hf_another", "/blobs/"):
            assert secret not in result.out + result.err, name
        left = tree(tmp_path / name) if (tmp_path / name).exists() else {}
        assert token.encode() not in b"".join(left.values()), name


# --- runs that end early --------------------------------------------------------------------------


def test_killed_run_continues_with_what_is_missing(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "ordered"))
    out, command = tmp_path / "out", ["--pp-size", 2, "--jobs", 1]
    online("split", REPO, tmp_path / "whole", *command)
    hub.forget()
    hub.fail("GET", WEIGHTS, skip=10, **STUCK)
    process = online.start("split", REPO, out, *command)
    until_stuck(hub, process)
    stop(process, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert_unfinished(out, tmp_path / "whole")
    first = without_headers(served(hub), HEADER)
    before = tree(out)
    del before[".reshard-partial/lock"]  # of the killed run; the next one takes it and leaves

    other = online("split", REPO, out, "--pp-size", 4)
    refused(other, "was begun with another partition: [4, 4], now [2, 2, 2, 2]")
    assert tree(out) == before

    hub.forget()
    result = online("split", REPO, out, *command, "--json")
    document = json.loads(result.out)
    assert document["reused"] >= 6
    assert document["reused"] + document["fetched"] == 12
    assert tree(out) == tree(tmp_path / "whole")
    second = without_headers(served(hub), HEADER)
    assert overlap(first, second) == 0
    assert nbytes(second) < nbytes(first)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_in_the_middle_of_a_range(
    hub: HubServer, online: Online, large: Path, tmp_path: Path, number: int
) -> None:
    local = divide(large, tmp_path / "local", 2)
    hub.create(REPO, files(large))
    hub.fail("GET", WEIGHTS, skip=1, cut_after=20 << 20)
    hub.fail("GET", WEIGHTS, skip=1, **STUCK)
    out = tmp_path / "out"
    command = ["split", REPO, out, "--pp-size", 2, "--jobs", 1]
    process = online.start(*command)
    until_stuck(hub, process)
    err = stop(process, number)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 130
        assert "error: interrupted" in err
        assert "hint: run the same command again; it continues where it stopped" in err
        assert "Traceback" not in err
    assert_unfinished(out, local)
    first = without_headers(served(hub), PROBE)
    assert nbytes(first) == 20 << 20
    hub.forget()
    result = online(*command)
    assert result.code == 0, result.err
    assert content(out) == content(local)
    twice = overlap(first, without_headers(served(hub), PROBE))
    assert twice < 5 << 20 if number == signal.SIGKILL else twice == 0


def test_killed_again_and_again(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    """Ranges arrive over many connections, in any order."""
    hub.create(REPO, files(models / "source"))
    out = tmp_path / "out"
    command = ["split", REPO, out, "--pp-size", 4]
    for _ in range(2):
        hub.forget()
        hub.fail("GET", WEIGHTS, skip=4 + 30, times=8, **STUCK)
        process = online.start(*command)
        until_stuck(hub, process, 8)
        stop(process, signal.SIGKILL)
        assert_unfinished(out, models / "out")
    hub.forget()
    result = online(*command)
    assert result.code == 0, result.err
    assert content(out) == content(models / "out")
    wanted = sum(path.stat().st_size for path in (models / "source").glob("*.safetensors"))
    ranges = without_headers(served(hub), PROBE)
    assert nbytes(ranges) < wanted * 2 / 3


def test_interrupt_while_headers_are_waited_for(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "source"))
    hub.fail("GET", r"00002-of-00004\.safetensors$", **STUCK)
    process = online.start("split", REPO, tmp_path / "out", "--pp-size", 4)
    until_stuck(hub, process)
    stop(process, signal.SIGINT)
    assert process.returncode == 130


def test_interrupt_while_a_comparison_waits(hub: HubServer, online: Online, models: Path) -> None:
    hub.create(REPO, files(models / "ordered"))
    hub.fail("GET", WEIGHTS, skip=5, **STUCK)
    process = online.start("verify", models / "ordered-out", "--source", REPO)
    until_stuck(hub, process)
    err = stop(process, signal.SIGINT)
    assert process.returncode == 130
    assert "error: interrupted" in err


def test_unfinished_output_of_another_commit(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    first = hub.create(REPO, files(models / "ordered"))
    hub.fail("GET", WEIGHTS, skip=6, **STUCK)
    command = [tmp_path / "out", "--pp-size", 2, "--jobs", 1]
    process = online.start("split", REPO, *command)
    until_stuck(hub, process)
    stop(process, signal.SIGKILL)
    hub.commit(REPO, {"README.md": b"better words"})
    refused(online("split", REPO, *command), f"was begun with another commit: {first}")
    assert online("split", f"{REPO}@{first}", *command).code == 0
    assert content(tmp_path / "out") == content(models / "ordered-out")


def test_killed_run_is_finished_from_the_cache(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, files(models / "ordered"))
    hub.fail("GET", WEIGHTS, skip=6, **STUCK)
    command = ["split", REPO, tmp_path / "out", "--pp-size", 2, "--jobs", 1]
    process = online.start(*command)
    until_stuck(hub, process)
    stop(process, signal.SIGKILL)
    download(online)
    result = online(*command, HF_HUB_OFFLINE="1")
    assert result.code == 0, result.err
    assert content(tmp_path / "out") == content(models / "ordered-out")
    assert not (tmp_path / "out/.reshard-partial").exists()


# --- hostile repositories -------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
PAGE = b"<!DOCTYPE html>\n<html><body>404</body></html>\n"
SHARD = "model.safetensors-00001-of-00002.safetensors"


BELOW_OR_OUTSIDE = [
    "../evil.json",
    "../../evil.safetensors",
    "stage-00-of-02/../../evil.safetensors",
    "stage-00-of-02/evil.safetensors",
    "sub/dir/model.safetensors",
    "stage-00-of-02/a\\b",
    ".cache/x",
]


def test_paths_below_or_outside_are_left_alone(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create(REPO, {**files(models / "small"), **dict.fromkeys(BELOW_OR_OUTSIDE, b"evil")})
    out = tmp_path / "a/b/out"
    result = online("split", REPO, out, "--pp-size", 2)
    assert result.code == 0, result.err
    assert not set(BELOW_OR_OUTSIDE) & set(requested(hub))
    assert content(out) == content(models / "small-out")
    assert not [path for path in tmp_path.rglob("*evil*") if "hub-storage" not in path.parts]
    assert [path.name for path in (tmp_path / "a").glob("*/*")] == ["out"]


def test_names_that_no_file_should_have(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    names = {"slash": "a\\b", "stage": "stage-00-of-02", "dots": "..."}
    for key, name in names.items():
        hub.create(f"org/{key}", {**files(models / "small"), name: b"odd"})
    commands = {key: ["split", f"org/{key}", tmp_path / key, "--pp-size", 2] for key in names}
    results = results_of(online, commands)
    dots = results.pop("dots")  # odd, but a name like any other
    assert dots.code == 0, dots.err
    assert (tmp_path / "dots/stage-00-of-02/...").read_bytes() == b"odd"
    for key, result in results.items():
        refused(result, "a file of this name cannot be carried along")
        assert not (tmp_path / key).exists()


def test_control_characters_do_not_reach_the_terminal(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    evil = "\x1b[31mevil\n"
    hub.create(
        REPO, {**files(models / "small"), f"{evil}/x": b"", f"{evil}.safetensors": b"evil" * 9}
    )
    result = online("split", REPO, tmp_path / "out", "--pp-size", 2)
    refused(result, "x1b[31mevil", hint=False)
    assert "\x1b" not in result.err + result.out


NO_CHECKPOINTS: list[tuple[dict[str, bytes | None], str]] = [
    ({"config.json": None}, ": there is no config.json"),
    ({SHARD: POINTER}, f"{SHARD}: this is a git-lfs pointer, not weights"),
    ({SHARD: PAGE}, f"{SHARD}: looks like a web page, not weights"),
    ({SHARD: b""}, f"{SHARD}: file is empty"),
    ({SHARD: b"\xff" * 40_000}, "exceeds the limit"),
    ({SHARD: b"\x02\0\0\0\0\0\0\0{}" + bytes(9)}, SHARD),
    ({SHARD: None}, "1 weight files of the checkpoint are missing"),
    (
        {"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
        "is not an acceptable file name",
    ),
    ({"reshard.json": b"{}"}, "reshard.json"),
]


def test_repositories_that_are_no_checkpoints(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    for number, (changes, _) in enumerate(NO_CHECKPOINTS):
        held = {**files(models / "small"), **changes}
        hub.create(f"org/m{number}", {p: data for p, data in held.items() if data is not None})
    commands = {
        words: ["split", f"org/m{number}", tmp_path / str(number), "--pp-size", 2]
        for number, (_, words) in enumerate(NO_CHECKPOINTS)
    }
    for words, result in results_of(online, commands).items():
        refused(result, words, hint=False)
    assert not [out for out in commands.values() if Path(str(out[2])).exists()]


def test_repository_of_another_format(hub: HubServer, online: Online, models: Path) -> None:
    config = models / "small/config.json"
    hub.create(REPO, {"config.json": config, "pytorch_model.bin": b"\x80\x02" * 4000})
    refused(online("plan", REPO, "--pp-size", 2), "no safetensors files here, only pytorch_model")
    hub.create("org/empty")
    refused(online("plan", "org/empty", "--pp-size", 2), "org/empty", "there is no config.json")


# --- the license ----------------------------------------------------------------------------------


def card(metadata: str) -> bytes:
    return f"---\n{metadata}\n---\n# Model\n".encode()


def test_license_of_the_model_card_is_recorded(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    metadata = "license: other\nlicense_name: qwen\nlicense_link: https://example.org/LICENSE"
    cards = {
        "named": card(metadata),
        "broken": card("license: [other\n  - : x"),
    }
    for name, text in cards.items():
        hub.create(f"org/{name}", {**files(models / "small"), "README.md": text})
    stage = ["--pp-size", 2, "--stage", 0]
    commands = {name: ["split", f"org/{name}", tmp_path / name, *stage] for name in cards}
    for name, result in results_of(online, commands).items():
        assert result.code == 0, (name, result.err)
        assert not list((tmp_path / name).rglob("README.md"))
    link = "https://example.org/LICENSE"
    expected = {"license": "other", "license_name": "qwen", "license_link": link}
    assert manifest(tmp_path / "named")["source"]["license"] == expected
    assert manifest(tmp_path / "broken")["source"]["license"] is None
    named = Manifest.parse((tmp_path / "named/reshard.json").read_bytes(), "reshard.json")
    assert replace(named, source=replace(named.source, license=None)).set_id == named.set_id


def test_license_does_not_change_the_set(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    sets = []
    for number, text in enumerate((card("license: mit"), card("license: gpl-3.0"), b"")):
        (source / "README.md").write_bytes(text)
        cli("split", source, tmp_path / str(number), "--pp-size", 2)
        sets.append(manifest(tmp_path / str(number)))
    licenses = [s["source"]["license"] and s["source"]["license"]["license"] for s in sets]
    assert licenses == ["mit", "gpl-3.0", None]
    assert len({s["set_id"] for s in sets}) == 1


# --- splitting a set that is on the Hub -----------------------------------------------------------


def without_local(out: Path) -> dict[str, object]:
    document = manifest(out)
    del document["local"]
    return {**content(out), "reshard.json": document}


def test_set_in_a_repository_is_split_again(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    divide(models / "ordered-out", tmp_path / "local", 4)
    hub.create("org/set", files(models / "ordered-out"))
    hub.fail("GET", r"/blobs/.*layer-00004.safetensors$", skip=1, corrupt=True)
    command = ["split", "org/set", tmp_path / "out", "--pp-size", 4]
    refused(
        online(*command),
        "stage-02-of-04/model-layer-00004.safetensors: its sha256 is ",
        "hint: run the same command again",
    )
    assert_unfinished(tmp_path / "out", tmp_path / "local")
    hub.forget()
    result = online(*command)
    assert result.code == 0, result.err
    assert without_local(tmp_path / "out") == without_local(tmp_path / "local")
    assert twice(served(hub)) == 0
    assert len(served(hub)) == 12  # replicas come once


def test_corrupted_reply_from_a_set_is_noticed(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    hub.create("org/set", files(models / "small-out"))
    command = ["split", "org/set", tmp_path / "out", "--pp-size", 1]
    for name, path in {
        "model-layer-00001.safetensors": "/blobs/.*layer-00001.safetensors$",  # its header
        "merges.txt": "/resolve/[0-9a-f]+/merges.txt",
    }.items():
        hub.fail("GET", path, corrupt=True)
        refused(online(*command), name)
        assert not (tmp_path / "out/reshard.json").exists()
    assert online(*command).code == 0
    divide(models / "small-out", tmp_path / "local", 1)
    assert without_local(tmp_path / "out") == without_local(tmp_path / "local")


def test_set_that_is_not_whole_is_refused(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    path = "stage-01-of-02/model-layer-00001.safetensors"
    held = files(models / "small-out")
    data = (models / "small-out" / path).read_bytes()
    hub.create("org/missing", {name: file for name, file in held.items() if name != path})
    hub.create("org/bytes", {**held, path: data[:-1] + bytes([data[-1] ^ 1])})
    hub.create("org/size", {**held, path: data[:-1]})
    names = ("missing", "bytes", "size")
    commands = {name: ["split", f"org/{name}", tmp_path / name, "--pp-size", 1] for name in names}
    for name, result in results_of(online, commands).items():
        refused(result, path)
        assert not (tmp_path / name).exists()


def test_part_of_a_set_is_not_split_again(
    hub: HubServer, online: Online, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "part"
    split(build_plan(open_checkpoint(models / "small"), 2), out, stages=[1])
    hub.create("org/set", files(out))
    refused(online("split", "org/set", tmp_path / "out", "--pp-size", 1), "stages 0 ")
    assert not (tmp_path / "out").exists()
