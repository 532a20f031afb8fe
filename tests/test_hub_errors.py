"""What can go wrong around the Hub: other servers, settings, caches, interrupts."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import run
from threading import Thread

import pytest

from reshard import split as split_plan
from reshard.checkpoint import open_checkpoint
from reshard.errors import BundleError
from reshard.manifest import Manifest
from reshard.plan import build_plan
from tests.checkpoints import build
from tests.conftest import Online, published, refused, together, tree, wait_for
from tests.hub_server import HubServer

REPO = "org/set"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of two stages."""
    root = tmp_path_factory.mktemp("set")
    source = build(root / "source")
    return split_plan(build_plan(open_checkpoint(source), 2), root / "out").root


class Answer(BaseHTTPRequestHandler):
    """Answers every question in the same way, as a captive portal does."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def portal() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Answer,), {})) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    "body", [b"<html>log in</html>", b"", b"null", b"[]", b"\xff", b'{"id": "org/set", "sha": "x"}']
)
def test_what_answers_is_no_hub(
    portal: ThreadingHTTPServer, online: Online, tmp_path: Path, body: bytes
) -> None:
    portal.RequestHandlerClass.body = body  # type: ignore[attr-defined]
    endpoint = f"http://127.0.0.1:{portal.server_port}"
    result = online("pull", REPO, tmp_path / "dest", "--stage", 0, HF_ENDPOINT=endpoint)
    refused(result, "does not answer as a Hub does", "HF_ENDPOINT")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HF_ENDPOINT", "http://[::1"),
        ("HF_ENDPOINT", "http://127.0.0.1:99999"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc"),
        ("HF_HUB_ETAG_TIMEOUT", "-1"),
        ("HF_TOKEN", "hf_s\N{LATIN SMALL LETTER E WITH ACUTE}cret"),
        ("HTTP_PROXY", "socks9://x:1"),
        ("SSL_CERT_FILE", "/"),
    ],
)
def test_settings_that_are_not_sane(
    hub: HubServer, online: Online, out: Path, tmp_path: Path, variable: str, value: str
) -> None:
    hub.create(REPO, published(out))
    result = online("pull", REPO, tmp_path / "dest", "--stage", 0, **{variable: value})
    refused(result)
    assert "cret" not in result.out + result.err


def test_password_of_the_endpoint_is_not_shown(online: Online, tmp_path: Path) -> None:
    endpoint = "http://somebody:secret@127.0.0.1:9"
    result = online("pull", REPO, tmp_path / "dest", "--stage", 0, HF_ENDPOINT=endpoint)
    refused(result, "cannot reach http://127.0.0.1:9")
    assert "secret" not in result.err


def test_list_of_files_that_leads_elsewhere(hub: HubServer, online: Online, out: Path) -> None:
    """Neither a token nor a question goes there; nor does the list go round and round."""
    hub.create(REPO, published(out))
    elsewhere = f'<{hub.blob_endpoint}/api/models/x/tree>; rel="next"'
    hub.fail("GET", "/tree/", headers={"Link": elsewhere})
    refused(online("inspect", REPO), "the list of files leads elsewhere")
    assert {request.origin for request in hub.requests} == {"api"}


def test_replies_that_are_not_the_bytes_asked_for(
    hub: HubServer, online: Online, out: Path, tmp_path: Path
) -> None:
    hub.create(REPO, published(out))
    hub.fail("GET", "/blobs/.*layer-00001", headers={"Content-Encoding": "gzip"})
    refused(online("pull", REPO, tmp_path / "dest", "--stage", 0), "asked for bytes ")
    assert not (tmp_path / "dest/model-layer-00001.safetensors").exists()
    assert online("pull", REPO, tmp_path / "dest", "--stage", 0).code == 0
    assert tree(tmp_path / "dest") == tree(out / "stage-00-of-02")


def test_cache_is_neither_trusted_nor_shared(
    hub: HubServer, online: Online, out: Path, tmp_path: Path
) -> None:
    """Of a cache without links, whose files look as any others."""
    commit = hub.create(REPO, published(out))
    download = [str(Path(sys.executable).parent / "hf"), "download", REPO, "--quiet"]
    run(download, check=True, capture_output=True, env=hub.environment(online.home))
    snapshot = online.home / "hub/models--org--set/snapshots" / commit
    for path in snapshot.rglob("*"):
        if path.is_symlink():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    result = online("pull", REPO, tmp_path / "dest", "--stage", 0, "--json")
    assert json.loads(result.out)["copied"] == len(list((tmp_path / "dest").glob("model-*s")))
    assert {path.stat().st_nlink for path in (tmp_path / "dest").iterdir()} == {1}
    layer = snapshot / "stage-00-of-02/model-layer-00001.safetensors"
    layer.write_bytes(layer.read_bytes()[:-1] + b"?")
    for source in (REPO, snapshot):
        refused(online("pull", source, tmp_path / "bad", "--stage", 0), "sha256 is")
    assert not (tmp_path / "bad/model-layer-00001.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_push_ends_when_it_is_told_to(
    hub: HubServer, online: Online, out: Path, number: signal.Signals
) -> None:
    """Though threads of the library are sending; these would go on for minutes."""
    hub.create(REPO, {".gitattributes": b""})
    hub.fail("PUT", ".*", times=100, delay=20)
    process = online.start("push", out, REPO)
    wait_for(lambda: "preupload" in str([r.path for r in hub.requests]))
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=15)
    assert (process.returncode, "error: interrupted" in err) == (130, True)
    assert len(hub.commits(REPO)) == 1


def test_interrupt_while_planning(hub: HubServer, online: Online) -> None:
    hub.create(REPO)
    hub.fail("GET", "/api/models/", times=9, status=503, headers={"Retry-After": "100"})
    process = online.start("plan", REPO, "--pp-size", 2)
    wait_for(lambda: bool(hub.requests))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert (process.returncode, "error: interrupted" in err, "Traceback" in err) == (
        130,
        True,
        False,
    )


def test_files_of_somebody_else_are_named_when_they_are_replaced(
    hub: HubServer, online: Online, out: Path
) -> None:
    hub.create(REPO, {"config.json": b"{}", "notes.txt": b"mine"})
    pushed = json.loads(online("push", out, REPO, "--json").out)
    assert pushed["notes"] == ["replaced in the repository, where they were of no set: config.json"]
    assert hub.files(REPO)["notes.txt"] == b"mine"


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "X.PTH"])
def test_weights_are_no_side_files(out: Path, name: str) -> None:
    raw = (out / "reshard.json").read_bytes()
    with pytest.raises(BundleError, match="is not an acceptable side file name"):
        Manifest.parse(raw.replace(b'"vocab.json"', json.dumps(name).encode()), "reshard.json")


def test_several_pushes_at_once_all_get_in(
    hub: HubServer, online: Online, out: Path, tmp_path: Path
) -> None:
    for stage in (0, 1):
        assert online("pull", out, tmp_path / str(stage), "--stage", stage).code == 0
    commands = [("push", tmp_path / str(stage), REPO, "--stage", str(stage)) for stage in (0, 1)]
    hub.create(REPO)
    assert [result.code for result in together(online, *commands)] == [0, 0]
    assert json.loads(hub.files(REPO)["reshard.json"])["present"] == [0, 1]


def test_another_set_tells_where_the_unfinished_one_came_from(
    hub: HubServer, online: Online, out: Path, tmp_path: Path
) -> None:
    commit = hub.create(REPO, published(out))
    hub.fail("GET", "/blobs/.*layer-00001", times=9, status=403)
    refused(online("pull", REPO, tmp_path / "dest", "--stage", 0), "permission refused")
    source = build(tmp_path / "other", seed=1)
    made = split_plan(build_plan(open_checkpoint(source), 2), tmp_path / "other-set").root
    hub.commit(REPO, published(made))
    refused(online("pull", REPO, tmp_path / "dest", "--stage", 0), f"(from {REPO}@{commit})")
