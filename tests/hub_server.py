"""A Hugging Face Hub on loopback: the real protocol for the real `huggingface_hub` client.

`HubServer` keeps repositories in memory and large files on disk. Tests create repositories, let
somebody else commit, ask for faults with `fail`, and read in `requests` what was asked for.

Two servers run, since the client tells the Hub from its storage by the origin: the API, and the
blobs behind it, to which `resolve` redirects for every file in LFS.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import socket
import socketserver
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit

Origin = Literal["api", "blob"]

_PIECE = 1 << 20
_SLOW_PIECE = 64 << 10
_ZEROS = bytes(_PIECE)
_CLIENT_DETAILS = "/api/agent-harnesses"
_GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


# --- what a repository holds ----------------------------------------------------------------------


@dataclass(frozen=True)
class Blob:
    """A large file with a sha256 that is known, or made up, so that nobody has to read the file."""

    path: Path
    sha256: str


Content = bytes | Path | Blob


@dataclass(frozen=True)
class Entry:
    """A file of a commit; `sha256` is None for a regular one, which carries its content."""

    size: int
    oid: str
    sha256: str | None = None
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Commit:
    """A commit and all files of its tree, by path."""

    sha: str
    parent: str | None
    title: str
    description: str
    date: str
    tree: Mapping[str, Entry] = field(repr=False)


@dataclass
class Repository:
    """`refs` maps full names (`refs/heads/main`, `refs/tags/v1`, `refs/pr/1`) to commits."""

    name: str
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict, repr=False)

    def find(self, revision: str) -> Commit:
        """The commit of a branch, a tag, a full reference or a commit id."""
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.commits[self.refs[ref]]
        if revision in self.commits:
            return self.commits[revision]
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def writable(self, revision: str) -> str:
        """The full name of a branch or pull request, which a commit can move."""
        for ref in (f"refs/heads/{revision}", revision):
            if ref in self.refs and not ref.startswith("refs/tags/"):
                return ref
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def record(
        self,
        ref: str,
        tree: Mapping[str, Entry],
        title: str,
        description: str = "",
        parent: str | None = None,
    ) -> Commit:
        """Add a commit, and let the reference point to it."""
        files = sorted((path, entry.oid) for path, entry in tree.items())
        identity = repr((self.name, parent, title, len(self.commits), files))
        sha = hashlib.sha1(identity.encode()).hexdigest()
        commit = Commit(sha, parent, title, description, _now(), dict(tree))
        self.commits[sha] = commit
        self.refs[ref] = sha
        return commit


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _pointer(sha256: str, size: int) -> bytes:
    """What git holds in place of a file in LFS."""
    lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{sha256}", f"size {size}")
    return "".join(f"{line}\n" for line in lines).encode()


def _regular_entry(content: bytes) -> Entry:
    return Entry(len(content), _git_oid(content), None, content)


def _lfs_entry(sha256: str, size: int) -> Entry:
    return Entry(size, _git_oid(_pointer(sha256, size)), sha256)


# --- what was asked, and what goes wrong ----------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request that was answered, or cut.

    `path` is as it was sent: quoted, with its query. `status` is 0 if no reply was begun.
    `received` and `sent` count the bytes of the bodies.
    """

    method: str
    origin: Origin
    path: str
    range: str | None
    status: int
    received: int
    sent: int


class HubError(Exception):
    """A reply with an error, in the words of the Hub."""

    def __init__(
        self, status: int, message: str, code: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **headers}
        if code:
            self.headers["X-Error-Code"] = code


class _Cut(Exception):
    """The connection ends here."""


@dataclass
class _Fault:
    """What goes wrong with the next `times` matching requests, once `skip` of them have passed."""

    method: str
    pattern: str
    times: int
    skip: int
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    ignore_range: bool = False
    wrong_length: bool = False
    corrupt: bool = False
    delay: float = 0

    def takes(self, method: str, path: str) -> bool:
        if not (re.fullmatch(self.method, method) and re.search(self.pattern, path)):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if not self.times:
            return False
        self.times -= 1
        return True


_NO_FAULT = _Fault("", "", times=0, skip=0)


# --- the Hub --------------------------------------------------------------------------------------


class HubServer(AbstractContextManager["HubServer"]):
    """A Hub that serves from construction on, until `close` or the end of a `with` block.

    `root` is a directory for what is uploaded. With `xet`, a directory, repositories are
    xet-enabled and that directory is the content-addressed storage; what was uploaded that way can
    be downloaded that way only.

    Tests may set `page_size`, the entries on a page of a listing; `lfs_size`, from which a file is
    kept in LFS whatever its name; `multipart_size`, above which a file is uploaded in parts of
    that size; and `tokens`, the role of each token: `write`, `read`, or any other word for an
    account that has no rights here.
    """

    def __init__(self, root: Path, *, xet: Path | None = None) -> None:
        self.xet = xet
        self.page_size = 1000
        self.lfs_size = 4096
        self.multipart_size: int | None = None
        self.tokens = {"hf_writetoken": "write", "hf_readtoken": "read"}
        self.user = "user"
        self.repositories: dict[str, Repository] = {}

        self._blobs: dict[str, Path] = {}
        self._xet_files: dict[str, tuple[str, int]] = {}
        self._faults: list[_Fault] = []
        self._requests: list[Request] = []
        self._running = 0
        self._lock = threading.RLock()
        self._idle = threading.Condition()
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

        self._servers = [_Server(self, "api"), _Server(self, "blob")]
        api, blob = (server.server_address[1] for server in self._servers)
        self.endpoint = f"http://127.0.0.1:{api}"
        self.blob_endpoint = f"http://localhost:{blob}"
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the ports and end every connection."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
            server.disconnect()

    def environment(self, home: Path, *, token: str | None = "hf_writetoken") -> dict[str, str]:
        """The variables that point a process to this Hub; `home` holds its caches."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_TOKEN": token or "",
            "HF_HUB_DISABLE_XET": "0" if self.xet else "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    # --- repositories, from the side of the server ---

    def create(
        self,
        repo: str,
        files: Mapping[str, Content] = {},
        *,
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Make a repository with one commit that holds these files; returns the commit's id.

        A large file is served from where it lies.
        """
        tree = self._keep(files)
        repository = Repository(repo, private, gated)
        with self._lock:
            self.repositories[repo] = repository
            return repository.record("refs/heads/main", tree, "initial commit").sha

    def commit(
        self,
        repo: str,
        files: Mapping[str, Content],
        *,
        delete: Iterable[str] = (),
        revision: str = "main",
        title: str = "Commit of somebody else",
    ) -> str:
        """Commit in passing, as somebody else would; returns the commit's id."""
        added = self._keep(files)
        with self._lock:
            repository = self.repositories[repo]
            ref = repository.writable(revision)
            head = repository.find(ref)
            tree = {**head.tree, **added}
            for path in delete:
                del tree[path]
            return repository.record(ref, tree, title, parent=head.sha).sha

    def head(self, repo: str, revision: str = "main") -> str:
        """The id of a revision's commit."""
        with self._lock:
            return self.repositories[repo].find(revision).sha

    def tree(self, repo: str, revision: str = "main") -> Mapping[str, Entry]:
        """The files of a revision: sizes and hashes."""
        with self._lock:
            return self.repositories[repo].find(revision).tree

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a revision: contents."""
        return {
            path: self._blobs[entry.sha256].read_bytes() if entry.sha256 else entry.content
            for path, entry in self.tree(repo, revision).items()
        }

    def commits(self, repo: str, revision: str = "main") -> list[Commit]:
        """The history of a revision, newest first."""
        with self._lock:
            repository = self.repositories[repo]
            commit = repository.find(revision)
            history = [commit]
            while commit.parent:
                commit = repository.commits[commit.parent]
                history.append(commit)
            return history

    def refs(self, repo: str) -> dict[str, str]:
        """Branches, tags and pull requests, by full names such as `refs/heads/main`."""
        with self._lock:
            return dict(self.repositories[repo].refs)

    # --- requests and faults ---

    @property
    def requests(self) -> list[Request]:
        """The log, in the order in which replies were complete.

        A client may have its reply before the server has noted that; so this waits for a moment
        while requests are being answered.
        """
        with self._idle:
            self._idle.wait_for(lambda: not self._running, timeout=1)
            return list(self._requests)

    def forget(self) -> None:
        """Empty the log."""
        with self._idle:
            self._idle.wait_for(lambda: not self._running, timeout=1)
            self._requests.clear()

    def fail(
        self,
        method: str,
        pattern: str,
        *,
        times: int = 1,
        skip: int = 0,
        status: int | None = None,
        headers: Mapping[str, str] = {},
        cut_after: int | None = None,
        ignore_range: bool = False,
        wrong_length: bool = False,
        corrupt: bool = False,
        delay: float = 0,
    ) -> None:
        """Let the next `times` requests go wrong, after `skip` more that do not.

        They are those whose method matches `method` in full, and in whose path, quoted and with
        its query, `pattern` is found; a blob's path is `/blobs/<sha256>?filename=<path>` on
        download and `/blobs/<sha256>`, maybe with `/<part>`, on upload. What goes wrong:

        * `status`: that reply, with `headers`; nothing is done,
        * `cut_after`: the connection ends after so many bytes of the reply's body, or, of a PUT,
          so many bytes of the request's,
        * `ignore_range`: 200 and all bytes though a range was asked for,
        * `wrong_length`: one byte fewer than asked for, under headers that say so,
        * `corrupt`: the byte in the middle of the body is flipped,
        * `delay`: seconds before each 64 KiB of the body, of a PUT that of the request.
        """
        with self._lock:
            self._faults.append(
                _Fault(
                    method,
                    pattern,
                    times,
                    skip,
                    status,
                    headers,
                    cut_after,
                    ignore_range,
                    wrong_length,
                    corrupt,
                    delay,
                )
            )

    def _fault(self, method: str, path: str) -> _Fault:
        with self._lock:
            return next((fault for fault in self._faults if fault.takes(method, path)), _NO_FAULT)

    @contextmanager
    def _noted(self, request: Callable[[], Request]) -> Iterator[None]:
        """While a request is answered; `request` tells in the end what became of it."""
        with self._idle:
            self._running += 1
        try:
            yield
        finally:
            with self._idle:
                self._running -= 1
                if (done := request()).path != _CLIENT_DETAILS:
                    self._requests.append(done)
                self._idle.notify_all()

    # --- the store of large files ---

    def _is_lfs(self, path: str, size: int) -> bool:
        return size > 0 and (path.endswith(".safetensors") or size >= self.lfs_size)

    def _keep(self, files: Mapping[str, Content]) -> dict[str, Entry]:
        """The entries of files that the server's side commits."""
        return {path: self._entry(path, content) for path, content in files.items()}

    def _entry(self, path: str, content: Content) -> Entry:
        if isinstance(content, Blob):
            self._blobs[content.sha256] = content.path
            return _lfs_entry(content.sha256, content.path.stat().st_size)
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if not self._is_lfs(path, size):
            return _regular_entry(content if isinstance(content, bytes) else content.read_bytes())
        if isinstance(content, Path):
            sha256 = _file_sha256(content)
            self._blobs.setdefault(sha256, content)
        else:
            sha256 = hashlib.sha256(content).hexdigest()
            if sha256 not in self._blobs:
                (self._root / sha256).write_bytes(content)
                self._blobs[sha256] = self._root / sha256
        return _lfs_entry(sha256, size)

    def _stored(self, sha256: str) -> Entry | None:
        """The entry of a large file that was uploaded, or None."""
        if sha256 in self._blobs:
            return _lfs_entry(sha256, self._blobs[sha256].stat().st_size)
        if self.xet and sha256 not in self._xet_files:
            self._xet_files = xet_files(self.xet)
        if sha256 in self._xet_files:
            return _lfs_entry(sha256, self._xet_files[sha256][1])
        return None


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def xet_files(storage: Path) -> dict[str, tuple[str, int]]:
    """The files in a local xet storage: sha256 -> (xet hash, size).

    A shard (`*.mdb`) has a header of 48 bytes, then records: a hash, flags and the number of
    segments, then 48 bytes for each segment, with its size in bytes at 36. Flag 31 repeats those
    for verification; flag 30 appends 48 bytes that begin with the sha256. 0xFF ends the records.
    """
    found = {}
    for shard in storage.rglob("*.mdb"):
        data = shard.read_bytes()
        at = 48
        while data[at : at + 32] != b"\xff" * 32:
            name = data[at : at + 32]
            flags, segments = struct.unpack_from("<II", data, at + 32)
            at += 48
            sizes = [struct.unpack_from("<I", data, at + 48 * i + 36)[0] for i in range(segments)]
            at += 48 * segments * (2 if flags & 1 << 31 else 1)
            if flags & 1 << 30:
                found[_xet_hex(data[at : at + 32])] = (_xet_hex(name), sum(sizes))
                at += 48
    return found


def _xet_hex(digest: bytes) -> str:
    """A hash in the notation of xet: four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))


# --- requests and replies -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A request, read in full; the body of a PUT lies in a file, `upload`, with that sha256."""

    path: str
    query: Mapping[str, str]
    body: bytes
    role: str | None
    upload: Path | None = None
    sha256: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class _Reply:
    """`ranged` replies obey the Range header."""

    body: bytes | Path = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    ranged: bool = False


_Route = Callable[..., _Reply]

_ROUTES: list[tuple[Origin, str, re.Pattern[str], _Route]] = []

_GROUPS = {
    "model": "/api/models/(?P<repo>[^/]+/[^/]+)",
    "repo": "(?P<repo>[^/]+/[^/]+)",
    "revision": "(?P<revision>[^/]+)",
    "name": "(?P<name>[^/]+)",
    "path": "(?P<path>.+)",
    "kind": "(?P<kind>read|write)",
    "sha256": "(?P<sha256>[0-9a-f]{64})",
    "part": r"(?P<part>\d+)",
}


def _route(origin: Origin, method: str, template: str) -> Callable[[_Route], _Route]:
    """Register a function for a path; what stands in braces becomes its keyword arguments."""
    pattern = re.compile(re.sub(r"{(\w+)}", lambda match: _GROUPS[match[1]], template))

    def register(function: _Route) -> _Route:
        _ROUTES.append((origin, method, pattern, function))
        return function

    return register


def _answer(hub: HubServer, origin: Origin, method: str, call: _Call) -> _Reply:
    """Find the route for a call, and take it. HEAD is GET without the body."""
    for at, verb, pattern, function in _ROUTES:
        match = pattern.fullmatch(call.path)
        if match and at == origin and verb == method.replace("HEAD", "GET"):
            named = {name: unquote(value) for name, value in match.groupdict().items() if value}
            return function(hub, call, **named)
    raise HubError(404, f"No route: {method} {call.path}")


def _json(value: object, status: int = 200, headers: Mapping[str, str] = {}) -> _Reply:
    return _Reply(
        json.dumps(value).encode(), status, {"Content-Type": "application/json", **headers}
    )


def _page(hub: HubServer, call: _Call, items: Sequence[object]) -> _Reply:
    """A page of a listing; a Link header leads to the next one."""
    start = int(call.query.get("cursor", 0))
    end = start + hub.page_size
    if end >= len(items):
        return _json(items[start:])
    query = urlencode({**call.query, "cursor": end})
    link = f'<{hub.endpoint}{call.path}?{query}>; rel="next"'
    return _json(items[start:end], headers={"Link": link})


def _accessible(hub: HubServer, call: _Call, repo: str, *, write: bool = False) -> Repository:
    """The repository, if the caller may read or write it; the Hub hides what may not be read."""
    repository = hub.repositories.get(repo)
    hidden = repository and repository.private and call.role not in ("read", "write")
    if repository is None or hidden:
        raise HubError(404 if call.role else 401, "Repository not found", "RepoNotFound")
    if write:
        _require_write(call)
    return repository


def _require_write(call: _Call) -> None:
    if call.role is None:
        raise HubError(401, "Invalid username or password.")
    if call.role != "write":
        raise HubError(403, "Forbidden: pass a token with write access")


def _require_file_access(call: _Call, repository: Repository) -> None:
    if repository.gated:
        message = f"Access to model {repository.name} is restricted."
        raise HubError(403 if call.role else 401, message, "GatedRepo")


# --- routes: accounts and repositories ------------------------------------------------------------


@_route("api", "GET", _CLIENT_DETAILS)
def _client_details(hub: HubServer, call: _Call) -> _Reply:
    """What a client asks for once per cache directory, whatever it is used for."""
    return _json({"standardEnvVars": [], "harnesses": {}})


@_route("api", "GET", "/api/whoami-v2")
def _whoami(hub: HubServer, call: _Call) -> _Reply:
    if call.role is None:
        raise HubError(401, "Invalid username or password.")
    auth = {"accessToken": {"displayName": "test", "role": call.role}}
    return _json({"type": "user", "name": hub.user, "orgs": [], "auth": auth})


@_route("api", "POST", "/api/repos/create")
def _create(hub: HubServer, call: _Call) -> _Reply:
    _require_write(call)
    wanted = call.json
    repo = f"{wanted.get('organization') or hub.user}/{wanted['name']}"
    reply = {"url": f"{hub.endpoint}/{repo}", "name": repo}
    private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
    with hub._lock:
        if repo in hub.repositories:
            return _json({"error": "You already created this model repo", **reply}, 409)
        hub.create(repo, {".gitattributes": _GIT_ATTRIBUTES}, private=private)
    return _json(reply)


@_route("api", "POST", "/api/validate-yaml")
def _validate_yaml(hub: HubServer, call: _Call) -> _Reply:
    return _json({"errors": [], "warnings": []})


@_route("api", "GET", "{model}(/revision/{revision})?")
def _model_info(hub: HubServer, call: _Call, repo: str, revision: str = "main") -> _Reply:
    repository = _accessible(hub, call, repo)
    commit = repository.find(revision)
    return _json(
        {
            "id": repo,
            "modelId": repo,
            "sha": commit.sha,
            "lastModified": commit.date,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "tags": [],
            "siblings": [_sibling(path, entry) for path, entry in sorted(commit.tree.items())],
        }
    )


def _sibling(path: str, entry: Entry) -> dict[str, object]:
    sibling: dict[str, object] = {"rfilename": path, "size": entry.size, "blobId": entry.oid}
    if entry.sha256:
        sibling["lfs"] = {"sha256": entry.sha256, **_sizes(entry.sha256, entry.size)}
    return sibling


def _sizes(sha256: str, size: int) -> dict[str, int]:
    return {"size": size, "pointerSize": len(_pointer(sha256, size))}


@_route("api", "GET", "{model}/tree/{revision}(/{path})?")
def _tree(hub: HubServer, call: _Call, repo: str, revision: str, path: str = "") -> _Reply:
    tree = _accessible(hub, call, repo).find(revision).tree
    recursive = call.query.get("recursive", "").lower() in ("true", "1")
    entries = _listing(hub, tree)
    prefix = f"{path}/" if path else ""
    below = [name for name in sorted(entries) if name.startswith(prefix)]
    if path and not below:
        raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
    shown = (name for name in below if recursive or "/" not in name.removeprefix(prefix))
    return _page(hub, call, [entries[name] for name in shown])


@_route("api", "POST", "{model}/paths-info/{revision}")
def _paths_info(hub: HubServer, call: _Call, repo: str, revision: str) -> _Reply:
    entries = _listing(hub, _accessible(hub, call, repo).find(revision).tree)
    paths = parse_qs(call.body.decode()).get("paths", [])
    return _json([entries[path] for path in paths if path in entries])


def _listing(hub: HubServer, tree: Mapping[str, Entry]) -> dict[str, dict[str, object]]:
    """All files and directories of a tree, as the Hub describes them."""
    entries: dict[str, dict[str, object]] = {}
    for path, entry in tree.items():
        entries[path] = {"type": "file", "path": path, "size": entry.size, "oid": entry.oid}
        if entry.sha256:
            entries[path]["lfs"] = {"oid": entry.sha256, **_sizes(entry.sha256, entry.size)}
            if entry.sha256 in hub._xet_files:
                entries[path]["xetHash"] = hub._xet_files[entry.sha256][0]
        for directory in map(str, PurePosixPath(path).parents[:-1]):
            oid = hashlib.sha1(directory.encode()).hexdigest()
            entries[directory] = {"type": "directory", "path": directory, "oid": oid, "size": 0}
    return entries


@_route("api", "GET", "{model}/commits/{revision}")
def _commits(hub: HubServer, call: _Call, repo: str, revision: str) -> _Reply:
    _accessible(hub, call, repo).find(revision)
    history = [
        {
            "id": commit.sha,
            "title": commit.title,
            "message": commit.description,
            "authors": [{"user": hub.user}],
            "date": commit.date,
        }
        for commit in hub.commits(repo, revision)
    ]
    return _page(hub, call, history)


@_route("api", "GET", "{model}/refs")
def _refs(hub: HubServer, call: _Call, repo: str) -> _Reply:
    refs = _accessible(hub, call, repo).refs
    kinds = {"branches": "refs/heads/", "tags": "refs/tags/", "pullRequests": "refs/pr/"}
    listed: dict[str, list[dict[str, str]]] = {
        kind: [
            {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": sha}
            for ref, sha in refs.items()
            if ref.startswith(prefix)
        ]
        for kind, prefix in kinds.items()
    }
    return _json({**listed, "converts": []})


@_route("api", "POST", "{model}/branch/{name}")
def _create_branch(hub: HubServer, call: _Call, repo: str, name: str) -> _Reply:
    start = call.json.get("startingPoint", "main")
    return _create_ref(hub, call, repo, f"refs/heads/{name}", start)


@_route("api", "POST", "{model}/tag/{revision}")
def _create_tag(hub: HubServer, call: _Call, repo: str, revision: str) -> _Reply:
    return _create_ref(hub, call, repo, f"refs/tags/{call.json['tag']}", revision)


def _create_ref(hub: HubServer, call: _Call, repo: str, ref: str, start: str) -> _Reply:
    with hub._lock:
        repository = _accessible(hub, call, repo, write=True)
        if ref in repository.refs:
            raise HubError(409, f"Reference already exists: {ref}")
        repository.refs[ref] = repository.find(start).sha
    return _json({})


@_route("api", "DELETE", "{model}/branch/{name}")
def _delete_branch(hub: HubServer, call: _Call, repo: str, name: str) -> _Reply:
    return _delete_ref(hub, call, repo, f"refs/heads/{name}")


@_route("api", "DELETE", "{model}/tag/{name}")
def _delete_tag(hub: HubServer, call: _Call, repo: str, name: str) -> _Reply:
    return _delete_ref(hub, call, repo, f"refs/tags/{name}")


def _delete_ref(hub: HubServer, call: _Call, repo: str, ref: str) -> _Reply:
    with hub._lock:
        if not _accessible(hub, call, repo, write=True).refs.pop(ref, None):
            raise HubError(404, f"Invalid rev id: {ref}", "RevisionNotFound")
    return _json({})


# --- routes: upload -------------------------------------------------------------------------------


@_route("api", "POST", "{model}/preupload/{revision}")
def _preupload(hub: HubServer, call: _Call, repo: str, revision: str) -> _Reply:
    tree = _accessible(hub, call, repo, write=True).find(revision).tree
    present = tree.get(".gitignore")
    ignore = call.json.get("gitIgnore", present.content.decode() if present else "")
    return _json({"files": [_upload_mode(hub, tree, file, ignore) for file in call.json["files"]]})


def _upload_mode(
    hub: HubServer, tree: Mapping[str, Entry], file: Mapping[str, Any], ignore: str
) -> dict[str, object]:
    path = file["path"]
    mode: dict[str, object] = {
        "path": path,
        "uploadMode": "lfs" if hub._is_lfs(path, file["size"]) else "regular",
        "shouldIgnore": _ignored(path, ignore),
    }
    if path in tree:
        mode["oid"] = tree[path].sha256 or tree[path].oid
    return mode


def _ignored(path: str, ignore: str) -> bool:
    """Does one of the plain patterns in a .gitignore match the path, or a part of it?"""
    rules = [line.strip().strip("/") for line in ignore.splitlines() if not line.startswith("#")]
    parts = (path, *path.split("/"))
    return any(fnmatchcase(part, rule) for rule in filter(None, rules) for part in parts)


@_route("api", "POST", r"/{repo}\.git/info/lfs/objects/batch")
def _lfs_batch(hub: HubServer, call: _Call, repo: str) -> _Reply:
    _accessible(hub, call, repo, write=True)
    xet = hub.xet and "xet" in call.json["transfers"]  # as huggingface_hub 1.x offers
    objects = []
    for wanted in call.json["objects"]:
        reply = {"oid": wanted["oid"], "size": wanted["size"]}
        if not hub._stored(wanted["oid"]):
            upload = _upload_action(hub, wanted["oid"], wanted["size"])
            verify = {"href": f"{hub.endpoint}/{repo}.git/info/lfs/verify"}
            reply["actions"] = {"upload": upload, "verify": verify}
        objects.append(reply)
    return _json({"transfer": "xet" if xet else "basic", "objects": objects})


def _upload_action(hub: HubServer, sha256: str, size: int) -> dict[str, object]:
    """Where to send a file, or its parts and the list of them.

    The client sends equal files at the same time, each with an upload of its own.
    """
    url = f"{hub.blob_endpoint}/blobs/{sha256}"
    chunk = hub.multipart_size
    if chunk is None or size <= chunk:
        return {"href": url}
    upload = uuid.uuid4().hex
    numbers = range(1, -(-size // chunk) + 1)
    parts = {f"{number:05}": f"{url}/{number}?upload={upload}" for number in numbers}
    complete = f"{hub.endpoint}/api/complete_multipart?upload={upload}"
    return {"href": complete, "header": {"chunk_size": str(chunk), **parts}}


@_route("blob", "PUT", "/blobs/{sha256}")
def _put_blob(hub: HubServer, call: _Call, sha256: str) -> _Reply:
    _add_blob(hub, call.upload, call.sha256, sha256)
    return _Reply(headers={"ETag": f'"{sha256}"'})


def _add_blob(hub: HubServer, upload: Path | None, sha256: str, expected: str) -> None:
    assert upload
    if sha256 != expected:
        raise HubError(400, f"The content has the sha256 {sha256}, not {expected}")
    with hub._lock:
        if expected not in hub._blobs:
            hub._blobs[expected] = upload.replace(hub._root / expected)


@_route("blob", "PUT", "/blobs/{sha256}/{part}")
def _put_part(hub: HubServer, call: _Call, sha256: str, part: str) -> _Reply:
    assert call.upload
    call.upload.replace(hub._root / f"{call.query['upload']}.{part}")
    return _Reply(headers={"ETag": f'"{call.sha256}"'})


@_route("api", "POST", "/api/complete_multipart")
def _complete(hub: HubServer, call: _Call) -> _Reply:
    upload = call.query["upload"]
    parts = [hub._root / f"{upload}.{part['partNumber']}" for part in call.json["parts"]]
    whole = hub._root / upload
    try:
        with open(whole, "wb") as out:
            for path in parts:
                with open(path, "rb") as part:
                    shutil.copyfileobj(part, out, _PIECE)
        _add_blob(hub, whole, _file_sha256(whole), call.json["oid"])
    finally:
        whole.unlink(missing_ok=True)
    for path in parts:
        path.unlink()
    return _json({})


@_route("api", "POST", r"/{repo}\.git/info/lfs/verify")
def _verify(hub: HubServer, call: _Call, repo: str) -> _Reply:
    _accessible(hub, call, repo, write=True)
    stored = hub._stored(call.json["oid"])
    if stored is None or stored.size != call.json["size"]:
        raise HubError(404, "There is no such object")
    return _json({})


@_route("api", "POST", "{model}/commit/{revision}")
def _commit(hub: HubServer, call: _Call, repo: str, revision: str) -> _Reply:
    header, *operations = (json.loads(line) for line in call.body.splitlines())
    summary, parent = header["value"]["summary"], header["value"].get("parentCommit")
    with hub._lock:
        repository = _accessible(hub, call, repo, write=True)
        ref = repository.writable(revision)
        head = repository.find(ref)
        if parent not in (None, head.sha):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(head.tree)
        for operation in operations:
            _apply(hub, tree, operation["key"], operation["value"])
        reply = {"success": True, "hookOutput": ""}
        if call.query.get("create_pr"):
            number = 1 + sum(ref.startswith("refs/pr/") for ref in repository.refs)
            ref = f"refs/pr/{number}"
            reply["pullRequestUrl"] = f"{hub.endpoint}/{repo}/discussions/{number}"
        description = header["value"].get("description", "")
        commit = repository.record(ref, tree, summary, description, head.sha)
    url = f"{hub.endpoint}/{repo}/commit/{commit.sha}"
    return _json({**reply, "commitOid": commit.sha, "commitUrl": url})


def _apply(hub: HubServer, tree: dict[str, Entry], key: str, value: Mapping[str, Any]) -> None:
    """Do to a tree what one line of a commit says."""
    path = value["path"]
    if key == "file":
        tree[path] = _regular_entry(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        entry = hub._stored(value["oid"])
        if entry is None or entry.size != value.get("size", entry.size):
            raise HubError(400, f"The LFS pointer of {path} points to a file that does not exist")
        tree[path] = entry
    elif key in ("deletedFile", "deletedFolder"):
        folder = f"{path.rstrip('/')}/"
        gone = [p for p in tree if p == path or key == "deletedFolder" and p.startswith(folder)]
        if not gone:
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for name in gone:
            del tree[name]
    else:
        raise HubError(400, f"Unknown operation: {key}")


@_route("api", "GET", "{model}/xet-{kind}-token/{revision}")
def _xet_token(hub: HubServer, call: _Call, repo: str, kind: str, revision: str) -> _Reply:
    _accessible(hub, call, repo, write=kind == "write")
    if hub.xet is None:
        raise HubError(404, "Xet is not enabled for this repository")
    url, token, expiration = f"local://{hub.xet}", "xet-token", int(time.time()) + 3600
    return _json(
        {"casUrl": url, "accessToken": token, "exp": expiration},
        headers={
            "X-Xet-Cas-Url": url,
            "X-Xet-Access-Token": token,
            "X-Xet-Token-Expiration": str(expiration),
        },
    )


# --- routes: download -----------------------------------------------------------------------------


@_route("api", "GET", "/{repo}/resolve/{revision}/{path}")
def _resolve(hub: HubServer, call: _Call, repo: str, revision: str, path: str) -> _Reply:
    repository = _accessible(hub, call, repo)
    _require_file_access(call, repository)
    commit = repository.find(revision)
    headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
    entry = commit.tree.get(path)
    if entry is None:
        raise HubError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit.sha})
    if entry.sha256 is None:
        return _Reply(entry.content, 200, {**headers, "ETag": f'"{entry.oid}"'}, ranged=True)
    headers["Location"] = f"{hub.blob_endpoint}/blobs/{entry.sha256}?filename={quote(path)}"
    headers["X-Linked-Size"] = str(entry.size)
    headers["X-Linked-Etag"] = f'"{entry.sha256}"'
    if entry.sha256 in hub._xet_files:
        token_url = f"{hub.endpoint}/api/models/{repo}/xet-read-token/{commit.sha}"
        headers["X-Xet-Hash"] = hub._xet_files[entry.sha256][0]
        headers["Link"] = f'<{token_url}>; rel="xet-auth"'
    return _Reply(b"", 302, headers)


@_route("blob", "GET", "/blobs/{sha256}")
def _get_blob(hub: HubServer, call: _Call, sha256: str) -> _Reply:
    if sha256 not in hub._blobs:
        raise HubError(404, "There is no such blob")
    return _Reply(hub._blobs[sha256], headers={"ETag": f'"{sha256}"'}, ranged=True)


# --- HTTP -----------------------------------------------------------------------------------------


class _Server(socketserver.ThreadingTCPServer):
    """One of the two origins."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: HubServer, origin: Origin) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.origin = origin
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def disconnect(self) -> None:
        """End the connections that clients keep open."""
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has just ended by itself

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave at any time
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests read `HubServer.requests`."""

    def _serve(self) -> None:
        self._status = self._received = self._sent = 0
        self._fault = self.server.hub._fault(self.command, self.path)
        self._slow = self._fault.delay > 0
        with self.server.hub._noted(self._request):
            try:
                self._reply()
            except (_Cut, ConnectionError):
                self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _request(self) -> Request:
        return Request(
            self.command,
            self.server.origin,
            self.path,
            self.headers.get("Range"),
            self._status,
            self._received,
            self._sent,
        )

    def _reply(self) -> None:
        hub = self.server.hub
        url = urlsplit(self.path)
        upload, sha256 = self._spool() if self.command == "PUT" else (None, "")
        body = b"" if upload else b"".join(self._pieces())
        try:
            if self._fault.status:
                raise HubError(self._fault.status, "This request was meant to fail")
            role = self._role() if self.server.origin == "api" else None
            call = _Call(url.path, dict(parse_qsl(url.query)), body, role, upload, sha256)
            reply = _answer(hub, self.server.origin, self.command, call)
            self._send(reply)
        except HubError as error:
            self._send(_json({"error": str(error)}, error.status, error.headers))
        finally:
            if upload:
                upload.unlink(missing_ok=True)

    def _role(self) -> str | None:
        """What the token may do; None without one."""
        header = self.headers.get("Authorization")
        if header is None:
            return None
        role = self.server.hub.tokens.get(header.removeprefix("Bearer "))
        if role is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return role

    # --- the request's body ---

    def _spool(self) -> tuple[Path, str]:
        """Write the body to a file; what is all zeros becomes a hole."""
        path = self.server.hub._root / uuid.uuid4().hex
        digest = hashlib.sha256()
        try:
            with open(path, "wb") as out:
                for piece in self._pieces():
                    digest.update(piece)
                    if len(piece) == _PIECE and piece == _ZEROS:
                        out.seek(_PIECE, io.SEEK_CUR)
                    else:
                        out.write(piece)
                out.truncate()
        except BaseException:
            path.unlink()
            raise
        return path, digest.hexdigest()

    def _pieces(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield from self._read(int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield from self._read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers

    def _read(self, size: int) -> Iterator[bytes]:
        put = self.command == "PUT"
        slow = self._slow and put
        cut = self._fault.cut_after if put else None
        while self._received != cut and size:
            if slow:
                time.sleep(self._fault.delay)
            most = min(size, _SLOW_PIECE if slow else _PIECE)
            piece = self.rfile.read(most if cut is None else min(most, cut - self._received))
            if not piece:
                raise ConnectionResetError("the client has left")
            self._received += len(piece)
            size -= len(piece)
            yield piece
        if self._received == cut:
            raise _Cut

    # --- the reply's body ---

    def _send(self, reply: _Reply) -> None:
        if isinstance(reply.body, bytes):
            size = len(reply.body)
        else:
            size = reply.body.stat().st_size
        headers = {"Content-Type": "application/octet-stream", **reply.headers}
        status, start, count = reply.status, 0, size
        asked = self.headers.get("Range")
        if reply.ranged:
            headers["Accept-Ranges"] = "bytes"
            if asked and not self._fault.ignore_range:
                start, count = _range(asked, size)
                status = 206
        if self._fault.wrong_length and count:
            count -= 1
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{start + count - 1}/{size}"
        self._status = status
        self.send_response(status)
        for name, value in {**headers, **self._fault.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(count))
        self.end_headers()
        if self.command != "HEAD":
            with _opened(reply.body) as file:
                self._stream(file, start, count)

    def _stream(self, file: io.BufferedIOBase, start: int, count: int) -> None:
        fault = self._fault
        cut = count if fault.cut_after is None else min(count, fault.cut_after)
        flipped = start + count // 2 if fault.corrupt else -1
        position, end = start, start + cut
        while position < end:
            if self._slow:
                time.sleep(fault.delay)
            size = min(_SLOW_PIECE if self._slow else 8 * _PIECE, end - position)
            if position <= flipped < position + size:
                file.seek(position)
                piece = bytearray(file.read(size))
                piece[flipped - position] ^= 0xFF
                self.connection.sendall(piece)
                sent = len(piece)
            else:
                sent = self.connection.sendfile(file, position, size)
            self._sent += sent
            position += sent
            if sent < size:
                raise _Cut  # the file has shrunk
        if cut < count:
            raise _Cut


def _opened(body: bytes | Path) -> io.BufferedIOBase:
    return io.BytesIO(body) if isinstance(body, bytes) else open(body, "rb")


def _range(header: str, size: int) -> tuple[int, int]:
    """Start and length of the range that a header asks for."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if not match or not any(match.groups()):
        raise HubError(400, f"Range not understood: {header}")
    first, last = match.groups()
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if start >= end:
        unsatisfied = {"Content-Range": f"bytes */{size}"}
        raise HubError(416, "Range not satisfiable", headers=unsatisfied)
    return start, end - start
