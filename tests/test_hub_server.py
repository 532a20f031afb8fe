"""The Hub on loopback, as the real client sees it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    hf_hub_url,
    hf_raise_for_status,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from tests.hub_server import Blob, HubServer, Request

# The client hands files to its HTTP library in a way that the library has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "me/model"
WEIGHTS = bytes(range(256)) * 40
FILES = {
    "README.md": b"---\ntags: [reshard]\n---\nText.\n",
    "config.json": b"{}\n",
    "stage-01/empty.txt": b"",
    "stage-01/model.safetensors": WEIGHTS,
    "stage-02/model.safetensors": WEIGHTS[::-1],
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token="hf_writetoken")


def additions(files: dict[str, bytes]) -> list[CommitOperationAdd]:
    return [CommitOperationAdd(path, content) for path, content in files.items()]


def push(api: HfApi, files: dict[str, bytes], parent: str | None = None) -> str:
    operations = additions(files)
    api.preupload_lfs_files(REPO, operations)
    return api.create_commit(REPO, operations, commit_message="push", parent_commit=parent).oid


def asked(hub: HubServer, method: str, part: str = "") -> list[Request]:
    """The logged requests with this method and this in their paths."""
    return [r for r in hub.requests if r.method == method and part in r.path]


def url(hub: HubServer, path: str) -> str:
    return hf_hub_url(REPO, path, endpoint=hub.endpoint)


def refusal(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return int(error.value.response.status_code)


# --- upload ---------------------------------------------------------------------------------------


def test_push(hub: HubServer, api: HfApi) -> None:
    assert api.whoami()["name"] == hub.user
    api.create_repo(REPO, private=True)
    api.create_repo(REPO, exist_ok=True)
    assert hub.repositories[REPO].private
    first = api.model_info(REPO).sha
    hub.forget()

    second = push(api, FILES, parent=first)

    assert hub.head(REPO) == second
    files = hub.files(REPO)
    assert files.pop(".gitattributes")  # which every repository has from the beginning
    assert files == FILES
    assert [commit.title for commit in hub.commits(REPO)] == ["push", "initial commit"]
    assert [commit.sha for commit in hub.commits(REPO)] == [second, first]
    lfs = {path for path, entry in hub.tree(REPO).items() if entry.sha256}
    assert lfs == {"stage-01/model.safetensors", "stage-02/model.safetensors"}
    puts = asked(hub, "PUT")
    assert [(r.origin, r.status, r.received) for r in puts] == [("blob", 200, len(WEIGHTS))] * 2


def test_push_onto_a_commit_of_somebody_else(hub: HubServer, api: HfApi) -> None:
    first = hub.create(REPO, {"config.json": b"1"})
    hub.commit(REPO, {"config.json": b"2"})
    with pytest.raises(HfHubHTTPError) as error:
        push(api, {"config.json": b"3"}, parent=first)
    assert refusal(error) == 412
    assert hub.files(REPO) == {"config.json": b"2"}


def test_unchanged_files_are_not_sent(hub: HubServer, api: HfApi) -> None:
    head = hub.create(REPO, FILES)
    assert push(api, FILES) == head
    assert not asked(hub, "PUT") and not asked(hub, "POST", "/commit/")


def test_deletion(hub: HubServer, api: HfApi) -> None:
    hub.create(REPO, FILES)
    gone = [CommitOperationDelete("stage-01/"), CommitOperationDelete("config.json")]
    api.create_commit(REPO, gone, commit_message="less")
    assert set(hub.tree(REPO)) == {"README.md", "stage-02/model.safetensors"}
    with pytest.raises(EntryNotFoundError):
        api.create_commit(REPO, [CommitOperationDelete("config.json")], commit_message="again")


def test_copies_send_nothing(hub: HubServer, api: HfApi) -> None:
    hub.create(REPO, FILES)
    paths = {"stage-01/model.safetensors": "copy.safetensors", "config.json": "copy.json"}
    copies = [CommitOperationCopy(source, path) for source, path in paths.items()]
    api.create_commit(REPO, copies, commit_message="copies")
    assert hub.files(REPO) == {**FILES, "copy.safetensors": WEIGHTS, "copy.json": b"{}\n"}
    assert not asked(hub, "PUT")


def test_pull_request(hub: HubServer, api: HfApi) -> None:
    head = hub.create(REPO, FILES)
    new = additions({"new.safetensors": WEIGHTS * 2})
    commit = api.create_commit(REPO, new, commit_message="new", create_pr=True)
    assert commit.pr_revision == "refs/pr/1"
    assert hub.refs(REPO) == {"refs/heads/main": head, "refs/pr/1": commit.oid}

    more = additions({"more.txt": b"more"})
    api.create_commit(REPO, more, commit_message="more", revision="refs/pr/1")
    assert {"new.safetensors", "more.txt"} < set(hub.files(REPO, "refs/pr/1"))
    assert hub.files(REPO) == FILES
    pulls = api.list_repo_refs(REPO, include_pull_requests=True).pull_requests
    assert pulls and [pull.ref for pull in pulls] == ["refs/pr/1"]


def test_branches_and_tags(hub: HubServer, api: HfApi) -> None:
    first = hub.create(REPO, FILES)
    api.create_tag(REPO, tag="v1")
    api.create_branch(REPO, branch="dev/x")
    second = hub.commit(REPO, {"config.json": b"[]"}, delete=["README.md"], revision="dev/x")
    assert api.model_info(REPO, revision="dev/x").sha == second
    assert [commit.commit_id for commit in api.list_repo_commits(REPO, revision="dev/x")] == [
        second,
        first,
    ]
    assert api.model_info(REPO, revision="v1").sha == api.model_info(REPO).sha == first
    with pytest.raises(HfHubHTTPError) as error:
        api.create_tag(REPO, tag="v1")
    assert refusal(error) == 409
    api.delete_tag(REPO, tag="v1")
    api.delete_branch(REPO, branch="dev/x")
    assert hub.refs(REPO) == {"refs/heads/main": first}


def test_multipart_upload_of_equal_files(hub: HubServer, api: HfApi) -> None:
    hub.create(REPO)
    hub.multipart_size = 3000
    files = {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS}
    push(api, files)
    assert hub.files(REPO) == files
    assert sum(r.received for r in asked(hub, "PUT")) == 2 * len(WEIGHTS)
    assert len(asked(hub, "PUT")) == 8 and len(asked(hub, "POST", "/complete")) == 2


def test_zeros_take_no_disk(hub: HubServer, tmp_path: Path) -> None:
    hub.create(REPO)
    content = b"begin" + bytes(5 << 20)
    sha256 = hashlib.sha256(content).hexdigest()
    assert get_session().put(f"{hub.blob_endpoint}/blobs/{sha256}", content=content).is_success
    stored = tmp_path / "hub" / sha256
    assert stored.read_bytes() == content
    assert stored.stat().st_blocks * 512 < len(content) / 2


def test_gitignore(hub: HubServer, api: HfApi) -> None:
    hub.create(REPO, {".gitignore": b"# what not to send\n*.log\n/tmp/\n\n"})
    push(api, {"a.log": b"a", "tmp/x.safetensors": WEIGHTS, "config.json": b"{}"})
    assert set(hub.tree(REPO)) == {".gitignore", "config.json"}


def test_upload_of_something_else(hub: HubServer, api: HfApi) -> None:
    """Content that belies its hash is refused, as is a commit that names what was never sent."""
    hub.create(REPO)
    sha256 = "0" * 64
    reply = get_session().put(f"{hub.blob_endpoint}/blobs/{sha256}", content=iter([b"a", b"b"]))
    assert reply.status_code == 400
    assert asked(hub, "PUT")[0].received == 2

    def commit(key: str, **value: str) -> int:
        lines = ({"key": "header", "value": {"summary": "s"}}, {"key": key, "value": value})
        target = f"{hub.endpoint}/api/models/{REPO}/commit/main"
        headers = {"Authorization": "Bearer hf_writetoken"}
        body = "\n".join(map(json.dumps, lines))
        return int(get_session().post(target, content=body, headers=headers).status_code)

    assert commit("lfsFile", path="a.safetensors", algo="sha256", oid=sha256) == 400
    assert commit("unknown", path="a") == 400
    assert not hub.tree(REPO)


# --- listings and download ------------------------------------------------------------------------


def test_listings(hub: HubServer, api: HfApi) -> None:
    hub.create(REPO, FILES)
    hub.page_size = 2
    everything = sorted([*FILES, "stage-01", "stage-02"])
    assert [e.path for e in api.list_repo_tree(REPO, recursive=True)] == everything
    assert len(asked(hub, "GET", "/tree/")) == 4
    assert [e.path for e in api.list_repo_tree(REPO, "stage-02")] == ["stage-02/model.safetensors"]
    siblings = api.model_info(REPO, files_metadata=True).siblings or []
    assert {s.rfilename: s.size for s in siblings} == {path: len(FILES[path]) for path in FILES}
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "stage-03"))

    found = api.get_paths_info(REPO, ["stage-01/model.safetensors", "absent", "stage-01"])
    assert [entry.path for entry in found] == ["stage-01/model.safetensors", "stage-01"]
    weights = found[0]
    assert isinstance(weights, RepoFile) and weights.lfs
    assert (weights.size, weights.lfs.size) == (len(WEIGHTS), len(WEIGHTS))
    assert weights.lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()


def test_download_and_then_offline(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    head = hub.create(REPO, FILES)
    weights = api.hf_hub_download(REPO, "stage-01/model.safetensors", cache_dir=tmp_path / "file")
    assert Path(weights).read_bytes() == WEIGHTS
    head_request, get_request = hub.requests
    assert (head_request.method, head_request.status, head_request.sent) == ("HEAD", 302, 0)
    assert (get_request.origin, get_request.sent) == ("blob", len(WEIGHTS))

    snapshot = Path(api.snapshot_download(REPO, cache_dir=tmp_path / "all"))
    assert snapshot.name == head
    hub.close()
    assert api.snapshot_download(REPO, cache_dir=tmp_path / "all") == str(snapshot)
    assert {path: (snapshot / path).read_bytes() for path in FILES} == FILES


def test_a_process_of_its_own(hub: HubServer, tmp_path: Path) -> None:
    """The environment alone brings a process here; what it says of itself is not logged."""
    hub.create(REPO, FILES, private=True)
    code = (
        "from huggingface_hub import hf_hub_download\n"
        f"print(open(hf_hub_download('{REPO}', 'config.json')).read())"
    )
    for token, ends_well in (("hf_readtoken", True), (None, False)):
        environment = hub.environment(tmp_path / f"home-{token}", token=token)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout == "{}\n\n") == ends_well
        assert ("RepositoryNotFoundError" in done.stderr) != ends_well
    assert [(r.method, r.status) for r in hub.requests] == [
        ("HEAD", 200),
        ("GET", 200),
        ("HEAD", 401),
    ]


@pytest.mark.parametrize(
    ("wanted", "begin", "end"),
    [
        ("8-99", 8, 100),
        ("10000-", 10000, 10240),
        ("10000-99999", 10000, 10240),
        ("-5", 10235, 10240),
    ],
)
@pytest.mark.parametrize("path", ["model.safetensors", "model.txt"])
def test_ranges(hub: HubServer, path: str, wanted: str, begin: int, end: int) -> None:
    """Of files in LFS, behind a redirect, as of regular ones."""
    hub.lfs_size = len(WEIGHTS) + 1
    hub.create(REPO, {path: WEIGHTS})
    reply = get_session().get(url(hub, path), headers={"Range": f"bytes={wanted}"})
    assert reply.status_code == 206
    assert reply.content == WEIGHTS[begin:end]
    assert reply.headers["Content-Range"] == f"bytes {begin}-{end - 1}/{len(WEIGHTS)}"
    lfs = path.endswith(".safetensors")
    assert [(r.origin, r.status) for r in hub.requests] == (
        [("api", 302), ("blob", 206)] if lfs else [("api", 206)]
    )
    assert hub.requests[-1].range == f"bytes={wanted}"


def test_range_past_the_end(hub: HubServer) -> None:
    hub.create(REPO, FILES)
    target = url(hub, "stage-01/model.safetensors")
    reply = get_session().get(target, headers={"Range": f"bytes={len(WEIGHTS)}-"})
    assert reply.status_code == 416
    assert reply.headers["Content-Range"] == f"bytes */{len(WEIGHTS)}"


def test_files_stay_where_they_are(hub: HubServer, tmp_path: Path) -> None:
    """Even a file far larger than memory or disk is served, and what is made up about it."""
    source, sparse = tmp_path / "source", tmp_path / "sparse"
    source.write_bytes(WEIGHTS)
    with open(sparse, "wb") as file:
        file.truncate(1 << 40)
    hub.create(REPO, {"a.safetensors": source, "b.safetensors": Blob(sparse, "b" * 64)})
    assert get_session().get(url(hub, "a.safetensors")).content == WEIGHTS
    tail = get_session().get(url(hub, "b.safetensors"), headers={"Range": "bytes=-8"})
    assert tail.content == bytes(8)
    assert hub.tree(REPO)["b.safetensors"].size == 1 << 40
    assert not any((tmp_path / "hub").iterdir())


# --- who may do what ------------------------------------------------------------------------------


def test_access(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    hub.create(REPO, FILES)
    hub.create("me/private", FILES, private=True)
    hub.create("me/gated", FILES, gated=True)
    reader = HfApi(endpoint=hub.endpoint, token="hf_readtoken")
    nobody = HfApi(endpoint=hub.endpoint, token=False)
    hub.tokens["hf_stranger"] = "none"
    stranger = HfApi(endpoint=hub.endpoint, token="hf_stranger")

    assert reader.model_info("me/private").private
    for account in (nobody, stranger):
        with pytest.raises(RepositoryNotFoundError):
            account.model_info("me/private")
        with pytest.raises(RepositoryNotFoundError):
            account.hf_hub_download("me/private", "config.json", cache_dir=tmp_path)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("me/absent")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPO, revision="absent")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download(REPO, "absent", cache_dir=tmp_path)

    assert api.model_info("me/gated").gated == "manual"
    with pytest.raises(GatedRepoError):
        api.hf_hub_download("me/gated", "config.json", cache_dir=tmp_path)
    gated = hf_hub_url("me/gated", "stage-01/model.safetensors", endpoint=hub.endpoint)
    headers = {"Authorization": "Bearer hf_writetoken", "Range": "bytes=0-7"}
    with pytest.raises(GatedRepoError) as error:
        hf_raise_for_status(get_session().get(gated, headers=headers))
    assert refusal(error) == 403


def test_tokens(hub: HubServer) -> None:
    hub.create(REPO, FILES)
    for token, status in (("hf_readtoken", 403), ("hf_unknown", 401), (False, 401)):
        other = HfApi(endpoint=hub.endpoint, token=token)
        writes = (
            partial(other.create_repo, "me/new"),
            partial(other.create_tag, REPO, tag="v1"),
            partial(other.preupload_lfs_files, REPO, additions(FILES)),
        )
        for write in writes:
            with pytest.raises(HfHubHTTPError) as error:
                write()
            assert refusal(error) == status
    with pytest.raises(HfHubHTTPError):
        HfApi(endpoint=hub.endpoint).whoami("hf_unknown")
    reader = HfApi(endpoint=hub.endpoint).whoami("hf_readtoken")
    assert reader["auth"]["accessToken"]["role"] == "read"


# --- faults ---------------------------------------------------------------------------------------


def test_status(hub: HubServer, api: HfApi) -> None:
    hub.create(REPO, FILES)
    hub.fail("POST", "/commit/", status=429, headers={"Retry-After": "7"}, skip=1)

    def commit(content: bytes) -> None:
        api.create_commit(REPO, additions({"config.json": content}), commit_message="change")

    commit(b"1")
    with pytest.raises(HfHubHTTPError) as error:
        commit(b"2")
    assert refusal(error) == 429
    assert error.value.response.headers["Retry-After"] == "7"
    assert hub.files(REPO)["config.json"] == b"1"
    commit(b"3")
    assert hub.files(REPO)["config.json"] == b"3"


def test_lost_reply(hub: HubServer, api: HfApi) -> None:
    """The commit is made, but the client does not learn of it."""
    hub.create(REPO, FILES)
    hub.fail("POST", "/commit/", cut_after=0)
    with pytest.raises(Exception, match="peer closed connection"):
        api.create_commit(REPO, additions({"new": b""}), commit_message="lost")
    assert hub.commits(REPO)[0].title == "lost"
    assert hub.requests[-1].sent == 0


def test_cut_upload(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    """A PUT ends in the middle; the client sends all of it again."""
    hub.create(REPO)
    hub.fail("PUT", "/blobs/", cut_after=5000)
    push(api, {"a.safetensors": WEIGHTS})
    assert [(r.status, r.received) for r in asked(hub, "PUT")] == [(0, 5000), (200, len(WEIGHTS))]
    assert hub.files(REPO) == {"a.safetensors": WEIGHTS}
    assert len(list((tmp_path / "hub").iterdir())) == 1


@pytest.mark.parametrize("path", ["model.safetensors", "model.txt"])
def test_cut_download(hub: HubServer, path: str) -> None:
    hub.lfs_size = len(WEIGHTS) + 1
    hub.create(REPO, {path: WEIGHTS})
    hub.fail("GET", "blobs|txt", cut_after=3000)
    with pytest.raises(Exception, match="received 3000 bytes, expected 10240"):
        get_session().get(url(hub, path))
    assert hub.requests[-1].sent == 3000
    assert get_session().get(url(hub, path)).content == WEIGHTS


@pytest.mark.parametrize("path", ["model.safetensors", "model.txt"])
def test_wrong_ranges(hub: HubServer, path: str) -> None:
    hub.lfs_size = len(WEIGHTS) + 1
    hub.create(REPO, {path: WEIGHTS})
    hub.fail("GET", "blobs|txt", ignore_range=True)
    hub.fail("GET", "blobs|txt", wrong_length=True)
    hub.fail("GET", "blobs|txt", corrupt=True)

    def read() -> tuple[int, str | None, bytes]:
        reply = get_session().get(url(hub, path), headers={"Range": "bytes=100-199"})
        return reply.status_code, reply.headers.get("Content-Range"), reply.content

    asked_for, right = WEIGHTS[100:200], "bytes 100-199/10240"
    assert read() == (200, None, WEIGHTS)
    assert read() == (206, "bytes 100-198/10240", asked_for[:-1])
    status, content_range, corrupt = read()
    assert (status, content_range) == (206, right)
    assert [i for i in range(100) if corrupt[i] != asked_for[i]] == [50]
    assert read() == (206, right, asked_for)


def test_slow_bodies(hub: HubServer) -> None:
    data = os.urandom(200_000)
    hub.create(REPO, {"model.safetensors": data})
    hub.fail("GET", "/blobs/.*filename=model", delay=0.05)
    hub.fail("PUT", "/blobs/", delay=0.05)
    begin = time.monotonic()
    assert get_session().get(url(hub, "model.safetensors")).content == data
    middle = time.monotonic()
    get_session().put(f"{hub.blob_endpoint}/blobs/{'0' * 64}", content=data)
    assert middle - begin > 0.2 and time.monotonic() - middle > 0.2


def test_closed_server(hub: HubServer) -> None:
    hub.create(REPO, FILES)
    assert get_session().get(url(hub, "config.json")).status_code == 200
    hub.close()
    with pytest.raises(Exception, match="refused"):
        get_session().get(url(hub, "config.json"))


# --- xet ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not importlib.util.find_spec("hf_xet"), reason="hf_xet is not installed")
def test_xet(tmp_path: Path) -> None:
    """Chunks go to the storage and come back; the Hub sees neither them nor a PUT."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(8_000_000))
    code = (
        "import huggingface_hub as hf\n"
        f"operations = [hf.CommitOperationAdd('model.safetensors', {str(source)!r})]\n"
        f"hf.preupload_lfs_files('{REPO}', operations, free_memory=False)\n"
        f"hf.create_commit('{REPO}', operations, commit_message='chunks')\n"
        f"print(hf.hf_hub_download('{REPO}', 'model.safetensors'), end='')"
    )
    (tmp_path / "xet").mkdir()
    with HubServer(tmp_path / "hub", xet=tmp_path / "xet") as hub:
        hub.create(REPO)
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        command = [sys.executable, "-c", code]
        copy = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        assert Path(copy.stdout).read_bytes() == source.read_bytes()
        assert hub.tree(REPO)["model.safetensors"].size == 8_000_000
        assert not [r for r in hub.requests if r.origin == "blob"]
