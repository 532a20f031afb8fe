"""Publishing sets: what a repository holds afterwards, whatever it held and whatever goes wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard import BundleSet, build_plan, open_checkpoint, pull, push, split
from reshard.errors import BundleError
from reshard.push import MAX_ENTRIES, MAX_FILE, MAX_FILES, check_limits
from tests.checkpoints import build
from tests.conftest import Online, Result, published, refused, together, tree, wait_for
from tests.hub_server import HubServer, Request

REPO = "org/set"
TOKEN = "hf_writetoken"
AUTOMATIC = ("README.md", ".gitattributes")


def divide(source: Path, out: Path, pp_size: int, stages: Sequence[int] | None = None) -> Path:
    split(build_plan(open_checkpoint(source), pp_size), out, stages=stages)
    return out


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Sets of one model, and one of another; pushing never changes them."""
    root = tmp_path_factory.mktemp("sets")
    source = build(root / "source")
    divide(source, root / "out", 4)
    divide(source, root / "one", 4, stages=[1])
    divide(source, root / "ends", 4, stages=[0, 3])
    divide(source, root / "thirds", 3)
    divide(build(root / "other-source", seed=1), root / "other", 4)
    pull(root / "out", root / "flat", [0, 3])
    before = tree(root)
    yield root
    assert tree(root) == before


def content(hub: HubServer, revision: str = "main", repo: str = REPO) -> dict[str, bytes]:
    files = hub.files(repo, revision)
    return {path: data for path, data in files.items() if path not in AUTOMATIC}


def asked(hub: HubServer, method: str, part: str = "") -> list[Request]:
    return [r for r in hub.requests if r.method == method and part in r.path]


def sent(hub: HubServer) -> list[str]:
    """The large files that were uploaded whole."""
    return [r.path for r in asked(hub, "PUT") if r.status == 200]


def stages_in_card(card: bytes) -> dict[int, bool]:
    """Of each stage in the table, whether it is in the repository."""
    rows = re.findall(r"^\| (\d+) \|.*\| (yes|not yet) \|$", card.decode(), re.MULTILINE)
    return {int(stage): there == "yes" for stage, there in rows}


# --- the plain case -------------------------------------------------------------------------------


def test_push_is_one_commit_that_makes_the_repository_the_set(
    hub: HubServer, online: Online, sets: Path
) -> None:
    result = online("push", sets / "out", REPO)
    assert result.code == 0, result.err
    assert content(hub) == published(sets / "out")
    assert set(hub.files(REPO)) == set(published(sets / "out")) | set(AUTOMATIC)
    assert len(hub.commits(REPO)) == 2
    assert not hub.repositories[REPO].private

    requests = [(r.method, r.path) for r in hub.requests]
    [commit] = [i for i, (_, path) in enumerate(requests) if "/commit/" in path]
    assert max(i for i, (method, _) in enumerate(requests) if method == "PUT") < commit
    assert len(sent(hub)) == len(set(sent(hub)))  # replicas are sent once
    assert f"{REPO} at {hub.head(REPO)}: " in result.out
    assert f"reshard pull {REPO}@{hub.head(REPO)} /models/source --stage 3" in result.out


@pytest.mark.parametrize(
    ("out", "options", "expected"),
    [
        ("one", [], "one"),
        ("out/stage-01-of-04", [], "one"),
        ("out", ["--stage", "1"], "one"),
        ("flat", [], "ends"),
        ("ends", ["--stage", "all"], None),
    ],
)
def test_layout_is_the_same_wherever_the_stages_lie(
    hub: HubServer,
    online: Online,
    sets: Path,
    out: str,
    options: list[str],
    expected: str | None,
) -> None:
    hub.create(REPO, {".gitattributes": b""})
    result = online("push", sets / out, REPO, *options)
    if expected is None:
        refused(result, "stages 1, 2 are not in")
        assert not hub.requests
    else:
        assert result.code == 0, result.err
        assert content(hub) == published(sets / expected)
        assert not asked(hub, "POST", "/repos/create")


def test_checksums_that_are_missing_are_added_on_the_way(
    hub: HubServer, online: Online, sets: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    split(build_plan(open_checkpoint(sets / "source"), 4), out, checksums=False)
    before = tree(out)
    assert b'"sha256": null' in before["stage-01-of-04/reshard.json"]
    assert online("push", out, REPO).code == 0
    assert content(hub) == published(sets / "out")
    assert tree(out) == before


def test_json(hub: HubServer, online: Online, sets: Path) -> None:
    result = online("push", sets / "one", REPO, "--private", "--json", "--quiet")
    assert hub.repositories[REPO].private
    document = json.loads(result.out)
    launch = document.pop("launch")
    files = hub.files(REPO)
    assert document == {
        "repo": REPO,
        "revision": None,
        "commit": hub.head(REPO),
        "pull_request": None,
        "set_id": json.loads(files["reshard.json"])["set_id"],
        "pp_size": 4,
        "present": [1],
        "changed": True,
        "added": len(files) - 1,  # all but .gitattributes
        "added_bytes": sum(len(data) for path, data in files.items() if path != ".gitattributes"),
        "copied": 0,
        "deleted": 0,
        "notes": [],
    }
    assert [(node["node"], node["stages"]) for node in launch] == [(1, [1])]
    assert launch[0]["pull"] == f"reshard pull {REPO}@{hub.head(REPO)} /models/source --stage 1"
    assert result.err == ""


# --- branches and pull requests -------------------------------------------------------------------


def test_new_branch_is_empty_whatever_main_holds(
    hub: HubServer, online: Online, sets: Path
) -> None:
    hub.create(REPO, {".gitattributes": b""})
    main = hub.commit(REPO, {"model.safetensors": b"weights", "notes.txt": b"notes"})
    result = online("push", sets / "one", REPO, "--revision", "pp4")
    assert result.code == 0, result.err
    assert content(hub, "pp4") == published(sets / "one")
    assert hub.head(REPO) == main
    assert f"reshard pull {REPO}@pp4 " in hub.files(REPO, "pp4")["README.md"].decode()

    assert online("push", sets / "ends", f"{REPO}@pp4", "--stage", "0,3").code == 0
    assert json.loads(hub.files(REPO, "pp4")["reshard.json"])["present"] == [0, 1, 3]
    assert hub.head(REPO) == main


def test_no_branch_is_made_where_weights_came_first(
    hub: HubServer, online: Online, sets: Path
) -> None:
    """As in a repository whose history was squashed: no commit is empty enough to begin at."""
    hub.create(REPO, {".gitattributes": b"", "model.safetensors": b"weights"})
    refused(
        online("push", sets / "one", REPO, "--revision", "pp4"),
        "the repository's first commit, and that holds weights",
        "choose another repository",
    )
    assert list(hub.refs(REPO)) == ["refs/heads/main"]


def test_only_branches_can_be_pushed_to(hub: HubServer, online: Online, sets: Path) -> None:
    commit = hub.create(REPO, {".gitattributes": b""})
    hub.forget()
    result = online("push", sets / "one", f"{REPO}@{commit}")
    assert (result.code, "only a branch can be pushed to" in result.err) == (2, True)
    assert {request.method for request in hub.requests} == {"GET"}


def test_new_repository_and_branch(hub: HubServer, online: Online, sets: Path) -> None:
    assert online("push", sets / "one", f"{REPO}@pp4", "--revision", "pp4").code == 0
    assert content(hub, "pp4") == published(sets / "one")
    assert content(hub) == {}


def test_pull_request_leaves_main_alone(hub: HubServer, online: Online, sets: Path) -> None:
    main = hub.create(REPO, {"notes.txt": b"notes"})
    document = json.loads(online("push", sets / "one", REPO, "--create-pr", "--json").out)
    assert set(hub.refs(REPO)) == {"refs/heads/main", "refs/pr/1"}
    assert hub.head(REPO) == main
    assert content(hub, "refs/pr/1") == {**published(sets / "one"), "notes.txt": b"notes"}
    assert document["pull_request"] == f"{hub.endpoint}/{REPO}/discussions/1"
    assert document["commit"] == hub.head(REPO, "refs/pr/1")


# --- pushing again --------------------------------------------------------------------------------


def test_unchanged_set_changes_nothing(hub: HubServer, online: Online, sets: Path) -> None:
    online("push", sets / "out", REPO)
    refs = hub.refs(REPO)
    hub.forget()
    for out, options in (("out", []), ("out", ["--create-pr"]), ("one", [])):
        result = online("push", sets / out, REPO, *options, "--json")
        document = json.loads(result.out)
        assert (document["changed"], document["pull_request"]) == (False, None)
        assert document["present"] == [0, 1, 2, 3]
    assert hub.refs(REPO) == refs
    assert {r.method for r in hub.requests} <= {"GET", "HEAD"}
    assert not [r for r in hub.requests if r.path.endswith(".safetensors")]


def test_other_partition_sends_no_weights_and_replaces_the_old_one(
    hub: HubServer, online: Online, sets: Path
) -> None:
    others = {
        "notes.txt": b"notes",
        "stage-00-of-04/notes.txt": b"more notes",
        "README.md": b"mine",
        ".gitattributes": b"*.gguf filter=lfs diff=lfs merge=lfs -text\n",
    }
    hub.create(REPO, {**published(sets / "out"), **others})
    old = content(hub)
    result = online("push", sets / "thirds", REPO, "--json")
    assert hub.files(REPO) == {**published(sets / "thirds"), **others}
    assert len(hub.commits(REPO)) == 2

    weights = [path for path in tree(sets / "thirds") if path.endswith(".safetensors")]
    document = json.loads(result.out)
    assert document["copied"] >= len(weights)  # an index may be the same as well
    assert document["deleted"] == len(set(old) - set(hub.files(REPO)))
    large = {entry.sha256 for path, entry in hub.tree(REPO).items() if path in weights}
    assert large.isdisjoint(path.removeprefix("/blobs/") for path in sent(hub))
    assert "left as it is" in document["notes"][0]


def test_other_model_replaces_the_set_too(hub: HubServer, online: Online, sets: Path) -> None:
    hub.create(REPO, published(sets / "out"))
    assert online("push", sets / "other", REPO).code == 0
    assert content(hub) == published(sets / "other")


def test_changed_files_of_the_same_size_are_restored(
    hub: HubServer, online: Online, sets: Path
) -> None:
    """Small files have no sha256 on the Hub, only git's checksum."""
    hub.lfs_size = 1 << 30
    whole = published(sets / "one")
    changed = {path: data[:-2] + b"?\n" for path, data in whole.items() if path.endswith(".json")}
    unchanged = ("reshard.json", "stage-01-of-04/reshard.json")  # one that could not be read
    hub.create(REPO, {**whole, **{p: d for p, d in changed.items() if p not in unchanged}})
    document = json.loads(online("push", sets / "one", REPO, "--json").out)
    assert content(hub) == whole
    assert document["added"] == len(changed) - len(unchanged) + 1  # and the card


def test_stages_one_by_one_end_in_the_same_repository(
    hub: HubServer, online: Online, sets: Path
) -> None:
    online("push", sets / "out", REPO)
    whole = hub.files(REPO)
    hub.create(REPO, {".gitattributes": whole[".gitattributes"]})
    for stages, there in (("2", {2}), ("0,3", {0, 2, 3}), ("1", {0, 1, 2, 3})):
        hub.forget()
        assert online("push", sets / "out", REPO, "--stage", stages).code == 0
        assert len(asked(hub, "POST", "/commit/")) == 1
        files = hub.files(REPO)
        held = {path for path in files if path.endswith(".safetensors")}
        assert {int(path[6:8]) for path in held} == there
        # An index names each tensor once, so a file that two stages have is named in the first.
        named = set(json.loads(files["model.safetensors.index.json"])["weight_map"].values())
        assert named <= held
        assert {Path(path).name for path in named} == {Path(path).name for path in held}
        assert stages_in_card(files["README.md"]) == {stage: stage in there for stage in range(4)}
    assert hub.files(REPO) == whole


def test_damaged_stage_that_is_to_stay_is_refused_and_can_be_repaired(
    hub: HubServer, online: Online, sets: Path
) -> None:
    lost = "stage-01-of-04/model-layer-00002.safetensors"
    whole = published(sets / "one")
    head = hub.create(REPO, {path: data for path, data in whole.items() if path != lost})
    refused(online("push", sets / "ends", REPO, "--stage", "0"), "stage 1", "--stage 1")
    assert hub.head(REPO) == head
    assert not asked(hub, "PUT") and not asked(hub, "POST")
    assert online("push", sets / "out", REPO, "--stage", "0-1").code == 0
    files = content(hub)
    absent = ("stage-02-of-04/", "stage-03-of-04/")
    assert set(files) == {p for p in published(sets / "out") if not p.startswith(absent)}
    assert files[lost] == (sets / "out" / lost).read_bytes()


def test_lost_index_of_the_repository(hub: HubServer, online: Online, sets: Path) -> None:
    """It can be made anew: the stages have their own."""
    whole = published(sets / "out")
    index = "model.safetensors.index.json"
    hub.create(REPO, {path: data for path, data in whole.items() if path != index})
    assert online("push", sets / "one", REPO).code == 0
    assert content(hub) == whole
    hub.create("org/other", {p: d for p, d in whole.items() if p != f"stage-00-of-04/{index}"})
    refused(online("push", sets / "one", "org/other"), "stages 0", "are not whole", "--stage 0")


# --- what somebody else may have there ------------------------------------------------------------


def test_weights_of_somebody_else_are_refused(hub: HubServer, online: Online, sets: Path) -> None:
    names = {
        "org/a": "model-00001-of-00002.safetensors",
        "org/b": "pytorch_model.bin",
        "org/c": "extra/adapter.safetensors",
        "org/d": "stage-01-of-04/model-layer-00002.safetensors",
    }
    for repo, name in names.items():
        hub.create(repo, {name: b"weights"})
    heads = {repo: hub.head(repo) for repo in names}
    for (repo, name), result in zip(
        names.items(),
        together(online, *(("push", sets / "one", repo) for repo in names)),
        strict=True,
    ):
        refused(result, name, "another repository", "--revision")
        assert hub.head(repo) == heads[repo]
    assert {r.method for r in hub.requests} == {"GET"}


def test_foreign_weights_beside_a_set_are_refused(
    hub: HubServer, online: Online, sets: Path
) -> None:
    hub.create(REPO, published(sets / "out"))
    head = hub.commit(REPO, {"stage-00-of-04/stray.safetensors": b"weights"})
    refused(online("push", sets / "thirds", REPO), "stage-00-of-04/stray.safetensors")
    assert hub.head(REPO) == head


def test_manifest_that_cannot_be_read_is_refused(
    hub: HubServer, online: Online, sets: Path
) -> None:
    good = published(sets / "one")["reshard.json"]
    manifests = {
        "org/b": b"not JSON",
        "org/c": b"{}",
        "org/d": good.replace(b'"format_version": 1', b'"format_version": 99'),
        "org/e": good.replace(b'"set_id": "', b'"set_id": "0'),
    }
    for repo, manifest in manifests.items():
        hub.create(repo, {"reshard.json": manifest})
    for result in together(online, *(("push", sets / "one", repo) for repo in manifests)):
        refused(result, "the set that it holds cannot be read")
    assert {r.method for r in hub.requests} == {"GET"}


def test_stages_are_not_added_to_another_set(hub: HubServer, online: Online, sets: Path) -> None:
    head = hub.create(REPO, published(sets / "thirds"))
    refused(
        online("push", sets / "out", REPO, "--stage", "1"),
        "holds another set; it differs in partition, stages",
        "only a push of all stages replaces it",
    )
    refused(online("push", sets / "one", REPO), "holds another set", "only a push of all stages")
    assert hub.head(REPO) == head
    assert {r.method for r in hub.requests} == {"GET"}


# --- sets that are not whole ----------------------------------------------------------------------


def damage(out: Path, kind: str) -> None:
    layer = out / "stage-01-of-04" / "model-layer-00002.safetensors"
    if kind == "missing":
        layer.unlink()
    elif kind == "flipped":
        data = bytearray(layer.read_bytes())
        data[-1] ^= 1
        layer.unlink()
        layer.write_bytes(data)
    elif kind == "side file":
        (out / "stage-01-of-04" / "config.json").write_bytes(b"{}")
    elif kind == "index":
        (out / "model.safetensors.index.json").write_bytes(b"{}")
    else:
        (out / "reshard.json").unlink()
        (out / ".reshard-partial").mkdir()


def test_set_that_is_not_whole_is_refused_before_anything_is_sent(
    hub: HubServer, online: Online, sets: Path, tmp_path: Path
) -> None:
    kinds = {
        "missing": "model-layer-00002.safetensors",
        "flipped": "sha256",
        "side file": "config.json",
        "index": "model.safetensors.index.json",
        "unfinished": "is an unfinished output",
    }
    commands = []
    for kind in kinds:
        shutil.copytree(sets / "one", tmp_path / kind)
        damage(tmp_path / kind, kind)
        commands.append(("push", tmp_path / kind, REPO))
    for word, result in zip(kinds.values(), together(online, *commands), strict=True):
        refused(result, word)
    assert {request.method for request in hub.requests} <= {"GET"} and not hub.repositories


def test_damage_in_the_stage_to_add_is_refused(
    hub: HubServer, online: Online, sets: Path, tmp_path: Path
) -> None:
    shutil.copytree(sets / "out", tmp_path / "out")
    damage(tmp_path / "out", "flipped")
    refused(online("push", tmp_path / "out", REPO, "--stage", "1"), "model-layer-00002")
    assert {request.method for request in hub.requests} <= {"GET"} and not hub.repositories


def test_damage_beside_the_stage_to_add_is_not_published(
    hub: HubServer, online: Online, sets: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(sets / "out", out)
    for path in ("config.json", "model.safetensors.index.json", "stage-02-of-04/config.json"):
        (out / path).write_bytes(b"{}")
    assert online("push", out, REPO, "--stage", "1").code == 0
    assert content(hub) == published(sets / "one")


def test_file_that_changes_meanwhile_is_not_published(
    hub: HubServer, online: Online, sets: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(sets / "ends", out)
    hub.fail("PUT", "/blobs/", delay=0.5)
    process = online.start("push", out, REPO)
    wait_for(lambda: any((tmp_path / "hub-storage").iterdir()))  # the first file is on its way
    with (out / "stage-03-of-04" / "model-head.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    _, err = process.communicate(timeout=60)
    refused(Result(process.returncode, "", err), "model-head.safetensors", "changed while")
    assert content(hub) == {}


@pytest.mark.parametrize(
    ("size", "copies", "words"),
    [
        (MAX_FILE, 1, None),
        (MAX_FILE + 1, 1, "more than the 47.0 GB that the Hub takes"),
        (1, MAX_ENTRIES + 1, "push some stages at a time"),
        (1, MAX_FILES // 4 + 1, "push some stages at a time"),
    ],
)
def test_limits_of_the_hub(sets: Path, size: int, copies: int, words: str | None) -> None:
    """With files that nobody has."""
    manifest = BundleSet.open(sets / "out").manifest
    stages = tuple(
        replace(stage, files=(replace(stage.files[0], bytes=size),) * copies)
        for stage in manifest.stages
    )
    large = replace(manifest, stages=stages)
    if words is None:
        check_limits(large, large.present)
    else:
        with pytest.raises(BundleError) as error:
            check_limits(large, large.present)
        assert words in f"{error.value.message} {error.value.hint}"
    if copies <= MAX_ENTRIES and size <= MAX_FILE:
        check_limits(large, [0])


def test_limits_are_checked_first(
    sets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody answers here, and nothing is hashed: an error of another kind would be raised."""
    monkeypatch.setattr(sys.modules["reshard.push"], "MAX_FILE", 1000)
    shutil.copytree(sets / "one", tmp_path / "out")
    damage(tmp_path / "out", "flipped")
    with pytest.raises(BundleError, match="more than the 1.00 kB that the Hub takes"):
        push(tmp_path / "out", REPO)


# --- failures -------------------------------------------------------------------------------------


def test_conflict_is_resolved(hub: HubServer, online: Online, sets: Path) -> None:
    hub.fail("POST", "/commit/", status=412)
    assert online("push", sets / "one", REPO).code == 0
    assert content(hub) == published(sets / "one")
    assert len(asked(hub, "POST", "/commit/")) == 2
    assert len(sent(hub)) == len(set(sent(hub)))


def test_commit_of_somebody_else_meanwhile_survives(
    hub: HubServer, online: Online, sets: Path, tmp_path: Path
) -> None:
    hub.create(REPO)
    hub.fail("PUT", "/blobs/", delay=0.5)
    process = online.start("push", sets / "one", REPO)
    wait_for(lambda: any((tmp_path / "hub-storage").iterdir()))  # the first file is on its way
    hub.commit(REPO, {"notes.txt": b"notes"})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert content(hub) == {**published(sets / "one"), "notes.txt": b"notes"}
    assert [r.status for r in asked(hub, "POST", "/commit/")] == [412, 200]
    titles = [commit.title for commit in hub.commits(REPO)]
    assert titles[1:] == ["Commit of somebody else", "initial commit"]
    assert len(sent(hub)) == len(set(sent(hub)))


@pytest.mark.parametrize(
    "fault", [{"cut_after": 0}, {"status": 500}, {"status": 503, "headers": {"Retry-After": "0"}}]
)
def test_commit_without_an_answer_is_made_once(
    hub: HubServer, online: Online, sets: Path, fault: dict[str, Any]
) -> None:
    hub.fail("POST", "/commit/", **fault)
    result = online("push", sets / "one", REPO)
    assert result.code == 0, result.err
    assert content(hub) == published(sets / "one")
    assert len(hub.commits(REPO)) == 2


def test_failing_requests_are_tried_again(hub: HubServer, online: Online, sets: Path) -> None:
    again = {"Retry-After": "0"}
    hub.fail("POST", "/preupload/", status=503, headers=again)
    hub.fail("GET", f"/{REPO}$", status=429, headers=again)
    hub.fail("POST", "/repos/create", status=502, headers=again)
    hub.fail("PUT", "/blobs/", cut_after=100)
    result = online("push", sets / "one", REPO)
    assert result.code == 0, result.err
    assert content(hub) == published(sets / "one")


def test_refusal_for_good_is_not_tried_again(hub: HubServer, online: Online, sets: Path) -> None:
    hub.fail("POST", "/commit/", times=9, status=403)
    refused(online("push", sets / "one", REPO), "permission refused", "role write")
    assert len(asked(hub, "POST", "/commit/")) == 1
    assert content(hub) == {}


@pytest.mark.parametrize("path", ["/blobs/", "/objects/batch", "/validate-yaml"])
def test_refusal_on_the_way(hub: HubServer, online: Online, sets: Path, path: str) -> None:
    hub.create(REPO)
    hub.fail("PUT|POST", path, times=99, status=400 if "yaml" in path else 403)
    result = online("push", sets / "one", REPO)
    refused(result)
    assert hub.blob_endpoint not in result.err  # its addresses are signed
    assert content(hub) == {}


def test_gitignore_that_drops_weights_is_noticed(
    hub: HubServer, online: Online, sets: Path
) -> None:
    hub.create(REPO, {".gitignore": b"*.safetensors\n"})
    refused(
        online("push", sets / "one", REPO),
        ".gitignore",
        "stage-01-of-04/model-layer-00002.safetensors",
    )
    hub.commit(REPO, {}, delete=[".gitignore"])
    assert online("push", sets / "one", REPO).code == 0
    assert content(hub) == published(sets / "one")


def test_killed_push_continues(hub: HubServer, online: Online, sets: Path, tmp_path: Path) -> None:
    first = hub.create(REPO)
    hub.fail("PUT", "/blobs/", skip=6, times=3, delay=2)
    process = online.start("push", sets / "out", REPO)

    def finished() -> set[str]:
        return {p.name for p in (tmp_path / "hub-storage").iterdir() if len(p.name) == 64}

    # Six are there, and the next three on their way.
    wait_for(lambda: len(finished()) >= 6 and len(list((tmp_path / "hub-storage").iterdir())) >= 9)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    there = finished()
    assert hub.head(REPO) == first

    hub.forget()
    assert online("push", sets / "out", REPO).code == 0
    assert there.isdisjoint(path.removeprefix("/blobs/") for path in sent(hub))
    assert content(hub) == published(sets / "out")
    assert len(hub.commits(REPO)) == 2


@pytest.mark.parametrize(
    ("token", "there", "words"),
    [
        ("hf_readtoken", True, ("permission refused", "role write")),
        ("hf_readtoken", False, ("permission refused", "role write")),
        ("", True, ("a token is needed", "hf auth login")),
        ("", False, ("a token is needed", "hf auth login")),
        ("hf_unknowntoken", True, ("token is not valid", "hf auth login")),
    ],
)
def test_tokens_that_do_not_do(
    hub: HubServer,
    online: Online,
    sets: Path,
    token: str,
    there: bool,
    words: tuple[str, ...],
) -> None:
    if there:
        hub.create(REPO)
    result = online("push", sets / "one", REPO, HF_TOKEN=token)
    refused(result, *words)
    assert not token or token not in result.err
    if there:
        debug = online("push", sets / "one", REPO, HF_TOKEN=token, RESHARD_DEBUG="1")
        assert (debug.code, "Traceback" in debug.err) == (1, True)
        assert not token or token not in debug.err
    assert not asked(hub, "PUT")


def test_token_in_a_reason_is_not_shown(hub: HubServer, online: Online, sets: Path) -> None:
    hub.create(REPO)
    hub.fail(
        "POST",
        "/preupload/",
        status=403,
        times=2,
        headers={"X-Error-Message": f"no rights for {TOKEN} \x1b[31m"},
    )
    for debug in (None, "1"):
        result = online("push", sets / "one", REPO, RESHARD_DEBUG=debug)
        assert result.code == 1
        assert TOKEN not in result.out + result.err
        assert debug or "\x1b" not in result.err


def test_too_many_requests(hub: HubServer, online: Online, sets: Path) -> None:
    hub.create(REPO)
    hub.fail("GET", f"/{REPO}$", times=99, status=429, headers={"Retry-After": "0"})
    refused(online("push", sets / "one", REPO), "too many requests", "wait some minutes")
    assert 1 < len(hub.requests) < 10


def test_offline(hub: HubServer, online: Online, sets: Path) -> None:
    refused(online("push", sets / "one", REPO, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")
    assert not hub.requests


def test_hub_that_does_not_answer(hub: HubServer, online: Online, sets: Path) -> None:
    nobody = "http://127.0.0.1:9"
    refused(online("push", sets / "one", REPO, HF_ENDPOINT=nobody), "cannot reach", nobody)


def test_usage(hub: HubServer, online: Online, sets: Path, tmp_path: Path) -> None:
    names = ("set", "org/set/more", "org/../set", "", "org/set@", "hf://")
    commands: list[tuple[object, ...]] = [("push", sets / "one", "--", name) for name in names]
    commands.append(("push", sets / "one", f"{REPO}@a", "--revision", "b"))
    commands.append(("push", sets / "one", REPO, "--stage", "4"))
    for command, result in zip(commands, together(online, *commands), strict=True):
        assert result.code == 2, (command, result.err)
        assert "Traceback" not in result.err
    refused(online("push", tmp_path / "nothing", REPO), "no such directory")
    assert not hub.requests


def test_names_that_the_client_library_refuses(hub: HubServer, online: Online, sets: Path) -> None:
    long, dashes = f"org/{'n' * 100}", "org/double--dash"
    for result in together(online, ("push", sets / "one", long), ("push", sets / "one", dashes)):
        assert (result.code, "Traceback" in result.err) == (2, False), result.err
    assert not hub.requests
