"""The Hugging Face Hub, as reshard uses it; the only module that imports huggingface_hub.

Tokens, endpoint, cache and offline mode are huggingface_hub's: HF_TOKEN, HF_ENDPOINT, HF_HOME,
HF_HUB_OFFLINE. Every failure becomes a `HubError`, in words that hold no token and no signed address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    cached_assets_path,
    constants,
    get_session,
    get_token,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not in its __all__
    build_hf_headers,
    hf_raise_for_status,
)

from reshard.errors import (
    HubConflictError,
    HubError,
    HubNotFoundError,
    HubReplyError,
    HubUnreachableError,
    StorageError,
    UsageError,
    listed,
    printable,
    quoted,
    storage_errors,
)
from reshard.patience import TRIES, Patience, is_transient
from reshard.reference import HubReference
from reshard.source import COMMIT, SHA256, foreign_weights
from reshard.version import __version__

_ClientError: type[Exception] = HfHubHTTPError.__bases__[0]
"""What the library's HTTP client (httpx2, in older releases httpx) raises, whichever it is."""

_NOT_OF_A_HUB = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    ImportError,
    vars(import_module(_ClientError.__module__.partition(".")[0]))["InvalidURL"],
)
"""What the library raises for replies that no Hub sends, and for settings that are not sane."""

_SETTINGS = "check the variables HF_ENDPOINT, HF_TOKEN and HF_HUB_*, proxies and certificates"
_TOKEN = re.compile(r"\b(hf|api_org)_\w{4,}")

_api = HfApi(library_name="reshard", library_version=__version__)
_T = TypeVar("_T")


class HubFile(NamedTuple):
    """A file of a repository. `sha256` is None for small files, which are in git itself."""

    size: int
    sha256: str | None
    blob_id: str

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> HubFile:
        """Read an entry of the list of files. Raises as a Hub's own entries never would."""
        lfs = entry.get("lfs")
        file = cls(lfs["size"] if lfs else entry["size"], lfs["oid"] if lfs else None, entry["oid"])
        if type(file.size) is not int or file.size < 0 or not isinstance(file.blob_id, str):
            raise TypeError
        if not isinstance(entry["path"], str) or (lfs and not SHA256.fullmatch(lfs["oid"])):
            raise TypeError
        return file


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository as it is at one commit."""

    reference: HubReference
    commit: str

    @classmethod
    def pin(cls, reference: HubReference, *, writing: bool = False) -> Repository:
        """The repository at the commit that its revision names now. `writing`: to push to it.

        Raises `HubUnreachableError` where nobody answers, `HubError` where the answer is no.
        """
        with _translated(reference, writing=writing):
            info = _retried(
                lambda: _api.model_info(
                    reference.repo,
                    revision=reference.revision,
                    timeout=constants.HF_HUB_ETAG_TIMEOUT,
                ),
                tries=3,  # where there is no network, people should not wait long to hear it
            )
            if not COMMIT.fullmatch(info.sha or ""):
                raise ValueError
        return cls(reference, str(info.sha))

    def files(self) -> dict[str, HubFile]:
        """All files of the repository, by path.

        Page by page with our own patience: the library would follow a page to any host, token
        included, and wait for as long as it is told.
        """
        url = f"{constants.ENDPOINT}/api/models/{self.reference.repo}/tree/{self.commit}"
        files: dict[str, HubFile] = {}
        pages = {url}
        query: dict[str, str] | None = {"recursive": "true"}
        with _translated(self.reference):
            while True:
                reply = _retried(partial(_get, url, params=query))
                for entry in reply.json():
                    if entry["type"] == "file":
                        files[entry["path"]] = HubFile.of(entry)
                url, query = reply.links.get("next", {}).get("url", ""), None
                if not url:
                    return files
                if url in pages or not url.startswith(f"{constants.ENDPOINT}/"):
                    raise HubReplyError(
                        f"{self.reference}: the list of files leads elsewhere", hint=_SETTINGS
                    )
                pages.add(url)

    def cached(self, path: str) -> Path | None:
        """Where the library's cache holds a file of this commit."""
        found = try_to_load_from_cache(self.reference.repo, path, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def stream(self, path: str, begin: int, end: int, size: int, stop: Event) -> Iterator[bytes]:
        """The bytes `begin` to `end` of a file of `size` bytes, in pieces of any length.

        What breaks off is taken up again where it stopped, unless `stop` is set. Raises `HubError`
        for a reply that is not exactly what was asked for, and where retrying does not help.
        """
        with _translated(self.reference, path):
            patience = Patience(stop=stop)
            while begin < end:
                try:
                    for piece in self._request(path, begin, end, size):
                        begin += len(piece)
                        patience.renew()
                        yield piece
                except _ClientError as error:
                    patience.spend(error, f"{self.reference}: {_reason(error)}")

    def _request(self, path: str, begin: int, end: int, size: int) -> Iterator[bytes]:
        part = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", self._url(path), **_request_options(part)) as reply:
            hf_raise_for_status(reply)
            wanted = f"bytes {begin}-{end - 1}/{size}"
            found = reply.headers.get("Content-Range")
            length = reply.headers.get("Content-Length")
            encoding = reply.headers.get("Content-Encoding", "identity")
            if (reply.status_code, found, length, encoding) != (
                206,
                wanted,
                str(end - begin),
                "identity",
            ):
                raise HubReplyError(
                    f"{self.reference}: {quoted(path)}: asked for {wanted}, the server answered "
                    f"{reply.status_code} with {quoted(f'{found}, length {length}, {encoding}')}",
                    hint="a proxy on the way may not pass range requests on; "
                    "hf download fetches whole files instead",
                )
            left = end - begin
            for piece in reply.iter_raw():
                left -= len(piece)
                yield piece
            if left:  # the client does not let this pass
                raise HubReplyError(f"{self.reference}: {quoted(path)}: a reply of another length")

    def whole(self, path: str, size: int) -> bytes:
        """The content of a small file of `size` bytes, asked for without a range."""

        def get() -> bytes:
            content = bytearray()
            with get_session().stream("GET", self._url(path), **_request_options()) as reply:
                hf_raise_for_status(reply)
                for piece in reply.iter_bytes():
                    content += piece
                    if len(content) > size:
                        break
            return bytes(content)

        with _translated(self.reference, path):
            return _retried(get)

    def _url(self, path: str) -> str:
        return hf_hub_url(self.reference.repo, path, revision=self.commit)


def _get(url: str, params: Mapping[str, str] | None = None) -> Any:
    reply = get_session().get(url, params=params, **_request_options())
    hf_raise_for_status(reply)
    return reply


def _request_options(headers: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """What every download says of itself, the token included, and how long it waits for bytes."""
    ours = build_hf_headers(library_name="reshard", library_version=__version__)
    return {"headers": {**ours, **headers}, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}


def cached_snapshot(reference: HubReference) -> tuple[Path, bool] | None:
    """The directory of the library's cache that holds a repository, and whether it is complete."""
    repo, revision = reference.repo, reference.revision
    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True)), True
    except LocalEntryNotFoundError as error:
        path: str | None = getattr(error, "snapshot_path", None)
        return (Path(path), False) if path else None
    except HFValidationError:
        return None


def assets_directory(repo: str, commit: str) -> Path:
    """Where what is made of a repository at a commit is kept, beside the cache (HF_ASSETS_CACHE)."""
    with storage_errors(constants.HF_ASSETS_CACHE):
        try:
            return cached_assets_path("reshard", namespace=repo, subfolder=commit)
        except ValueError as error:  # a file stands where a directory should be
            raise StorageError(
                f"{quoted(constants.HF_ASSETS_CACHE)}: {quoted(str(error))}",
                hint="correct HF_ASSETS_CACHE or HF_HOME, or remove what is in the way",
            ) from None


def look_before_push(reference: HubReference) -> Repository | None:
    """What a push would go on from; None where repository or branch have to be created.

    Raises `HubError` without a token, `UsageError` where the revision is no branch.
    """
    if get_token() is None:
        raise HubError(f"{reference}: a token is needed", hint=_login())
    try:
        there = Repository.pin(reference, writing=True)
    except HubNotFoundError:
        return None
    if reference.revision is not None:
        _require_branch(reference, reference.revision)
    return there


def open_for_push(reference: HubReference, *, private: bool) -> Repository:
    """The repository and branch that a push goes to, created where they do not exist.

    A new branch begins at the repository's first commit: mostly empty, as branches of other sets
    should be. Raises `HubError` where that commit holds weights.
    """
    repo, branch = reference.repo, reference.revision
    try:
        return Repository.pin(reference, writing=True)
    except HubNotFoundError as missing:
        if missing.repository:
            with _translated(reference, writing=True):
                _retried(lambda: _api.create_repo(repo, private=private or None, exist_ok=True))
    if branch is not None:
        with _translated(reference, writing=True):
            first = _api.list_repo_commits(repo)[-1].commit_id
            weights = foreign_weights(Repository(reference, first).files(), ())
            if weights:
                raise HubError(
                    f"{reference}: a new branch begins at the repository's first commit, and that "
                    f"holds weights:{listed(weights)}",
                    hint="choose another repository",
                )
            _retried(lambda: _api.create_branch(repo, branch=branch, revision=first, exist_ok=True))
    return Repository.pin(reference, writing=True)


def _require_branch(reference: HubReference, revision: str) -> None:
    """Raise `UsageError` unless a revision is one that commits can be added to."""
    with _translated(reference):
        branches = _retried(lambda: _api.list_repo_refs(reference.repo)).branches
    if revision not in [branch.name for branch in branches] and not revision.startswith("refs/pr/"):
        raise UsageError(
            f"{reference}: this is a tag or a commit, and only a branch can be pushed to",
            hint="give a branch, which is created if it does not exist",
        )


class Draft:
    """A commit in the making, on top of `parent`. It is published whole, or nothing is.

    The library's operations remember what the Hub held when they were made: after a conflict, a new
    draft is needed.
    """

    def __init__(self, parent: Repository, *, create_pr: bool, patience: Patience) -> None:
        self.parent = parent
        self._patience = patience
        self._create_pr = create_pr
        self._operations: list[
            CommitOperationAdd | CommitOperationCopy | CommitOperationDelete
        ] = []

    def add(self, files: Mapping[str, Path | bytes]) -> dict[str, str]:
        """Send files, but not what the Hub has already; the sha256 of each as it was read."""
        reference = self.parent.reference
        with _translated(reference, writing=True), _sending(reference):
            operations = [CommitOperationAdd(path, content) for path, content in files.items()]
            _interruptible(
                partial(
                    _api.preupload_lfs_files,
                    reference.repo,
                    operations,
                    revision=reference.revision,
                    create_pr=self._create_pr,
                    free_memory=False,
                )
            )
            # Not public, so without it the check after the commit has to do.
            ignored = [o.path_in_repo for o in operations if getattr(o, "_should_ignore", False)]
            if ignored:
                raise HubError(
                    f"{reference}: the .gitignore in the repository drops{listed(ignored)}",
                    hint="remove these patterns from it, then push again",
                )
            self._operations += operations
            return {op.path_in_repo: op.upload_info.sha256.hex() for op in operations}

    def copy(self, path: str, twin: str) -> None:
        """Give a file the content of another one that the parent holds; nothing is sent."""
        copy = CommitOperationCopy(twin, path, src_revision=self.parent.commit)
        self._operations.append(copy)

    def delete(self, path: str) -> None:
        self._operations.append(CommitOperationDelete(path))

    def publish(self, title: str) -> tuple[Repository, str | None]:
        """Make the commit: the repository as it is there, and the address of the pull request.

        Raises `HubConflictError` where the branch is no longer at the parent, or the reply was
        lost, maybe after the commit was made: then only reading the repository again can tell.
        """
        reference = self.parent.reference
        with _translated(reference, writing=True):
            try:
                made = _api.create_commit(
                    reference.repo,
                    self._operations,
                    commit_message=title,
                    revision=reference.revision,
                    parent_commit=self.parent.commit,
                    create_pr=self._create_pr,
                )
            except _ClientError as error:
                if not self._create_pr:
                    self._patience.spend(error, f"{reference}: {_reason(error)}")
                    raise HubConflictError(f"{reference}: no answer to a commit") from None
                if not is_transient(error):
                    raise
                where = f"{_endpoint()}/{reference.repo}/discussions"
                raise HubError(
                    f"{reference}: no answer; the pull request may be open nevertheless",
                    hint=f"look at {where} first: another push would open another one",
                ) from None
            except ValueError as error:
                raise HubError(
                    f"{reference}: the Hub refuses README.md: {_redacted(str(error))}",
                    hint="write a README.md of your own there; push leaves it as it is",
                ) from None
        branch = made.pr_revision if self._create_pr else reference.revision
        return Repository(reference.at(branch), made.oid), made.pr_url


def _interruptible(work: Callable[[], object]) -> None:
    """Do it in a thread that an interrupt does not wait for: the library's own threads do."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # passed on
            failures.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _retried(call: Callable[[], _T], tries: int = TRIES) -> _T:
    """The result of a call that changes nothing when it is repeated."""
    patience = Patience(tries)
    while True:
        try:
            return call()
        except _ClientError as error:
            patience.spend(error, f"{_endpoint()}: {_reason(error)}")


@contextmanager
def _translated(
    reference: HubReference, path: str | None = None, *, writing: bool = False
) -> Iterator[None]:
    """Turn what the library raises into a `HubError` in our own words."""
    what = str(reference) if path is None else f"{reference}: {quoted(path)}"
    login = _login()
    try:
        yield
    except OfflineModeIsEnabled:
        raise HubUnreachableError(
            f"{what}: offline mode is on (HF_HUB_OFFLINE)",
            hint="unset HF_HUB_OFFLINE"
            + ("" if writing else "; hf download fills the cache for times without a network"),
        ) from None
    except HFValidationError:
        raise UsageError(f"{what}: this cannot be the name of a repository") from None
    except LocalTokenNotFoundError:
        raise HubError(f"{what}: a token is needed", hint=login) from None
    except GatedRepoError:
        raise HubError(
            f"{what}: access is gated",
            hint=f"ask for it at {_endpoint()}/{reference.repo}, then {login}",
        ) from None
    except RevisionNotFoundError:
        raise HubNotFoundError(
            f"{what}: the repository has no such revision",
            hint="give a branch, a tag or a commit: org/name@revision",
            repository=False,
        ) from None
    except RepositoryNotFoundError:
        no_directory = (
            "" if Path(reference.repo).exists() else " (no such directory is here either)"
        )
        raise HubNotFoundError(
            f"{what}: {_endpoint()} has no such repository, or hides it from you",
            hint=f"check the name{no_directory}; for a private repository, {login}",
            repository=True,
        ) from None
    except EntryNotFoundError:
        hint = "run the same command again"
        raise HubError(f"{what}: the repository has no such file", hint=hint) from None
    except HfHubHTTPError as error:
        raise _refusal(error, what, reference, writing) from None
    except _ClientError as error:
        raise HubUnreachableError(
            f"{what}: cannot reach {_endpoint()}: {_reason(error)}",
            hint="check the network, proxy and HF_ENDPOINT; then run the same command again",
        ) from None
    except OSError as error:  # certificates that cannot be read, and the like
        raise HubError(f"{what}: {_reason(error)}", hint=_SETTINGS) from error
    except _NOT_OF_A_HUB as error:
        raise HubReplyError(
            f"{what}: {_endpoint()} does not answer as a Hub does, or cannot be asked "
            f"({_reason(error)})",
            hint=_SETTINGS,
        ) from error


@contextmanager
def _sending(reference: HubReference) -> Iterator[None]:
    """Turn what sending files raises besides the client's own errors: into these, or a `HubError`."""
    failure: Exception
    try:
        yield
        return
    except (_ClientError, OfflineModeIsEnabled):
        raise
    except OSError as error:
        if error.filename is not None:
            with storage_errors(error.filename):
                raise
        failure = error
    except (RuntimeError, ValueError) as error:  # of the threads that send, of xet, of LFS
        if isinstance(error.__cause__, _ClientError):
            raise error.__cause__ from None
        failure = error
    raise HubError(
        f"{reference}: a file could not be sent: {_redacted(str(failure))}",
        hint="run the same command again; if it fails again, set HF_HUB_DISABLE_XET=1",
    )


def _endpoint() -> str:
    """Where the Hub is, without a password."""
    return re.sub(r"//[^/@]*@", "//", constants.ENDPOINT)


def _login() -> str:
    """What helps where a token is missing or wrong."""
    if os.environ.get("HF_TOKEN"):
        return "set HF_TOKEN to a token that is valid for this, or unset it and hf auth login"
    return "log in with hf auth login, or set HF_TOKEN"


def _refusal(error: HfHubHTTPError, what: str, reference: HubReference, writing: bool) -> HubError:
    """The error for a reply of another status than success."""
    status = error.response.status_code
    said = _redacted(error.server_message or "")
    if status == 401:
        problem = "a token is needed" if get_token() is None else "the token is not valid"
        return HubError(f"{what}: {problem}", hint=_login())
    if status == 403:
        need = (
            f"the token needs the role write, or write access to the contents of {reference.repo}"
            if writing
            else "the token may not read this"
        )
        return HubError(
            f"{what}: permission refused: {said or 'no reason given'}",
            hint=f"{need}; see {_endpoint()}/settings/tokens",
        )
    if status in (409, 412):
        return HubConflictError(
            f"{what}: somebody else changed the repository meanwhile",
            hint="run the same command again",
        )
    if status == 429:
        return HubError(
            f"{what}: too many requests",
            hint="wait some minutes and run the same command again; a token raises the limit",
        )
    return HubError(
        f"{what}: the Hub answers {status}: {said or 'no reason given'}",
        hint="run the same command again later" if status >= 500 else None,
    )


def _reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, HfHubHTTPError):
        return f"the Hub answers {error.response.status_code}"
    return _redacted(str(error) or type(error).__name__)


def _redacted(text: str) -> str:
    """Text of the Hub, on one line, without tokens, and without addresses, which may be signed."""
    token = get_token()
    text = text.replace(token, "***") if token else text
    text = re.sub(r"\w+://\S+", "(an address)", _TOKEN.sub("***", text))
    return quoted(printable(" ".join(text.split())))
