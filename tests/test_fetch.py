"""Files whose bytes arrive in parts: what is noted, what a later run asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from reshard import fetch, open_checkpoint
from reshard.canonical import plan_files
from reshard.errors import BundleError, HubError, HubReplyError, OutputError
from reshard.fetch import fetch_tasks
from reshard.output import OutputDirectory
from reshard.progress import Silent
from reshard.source import LocalSource, Range
from reshard.tasks import FileTask, FinishedTask
from tests.checkpoints import build, read_file

PIECE = 1000


class FarSource(LocalSource):
    """A directory as if it were elsewhere, on a line that is cut after `budget` bytes."""

    def __init__(self, root: Path, budget: int = 1 << 60) -> None:
        super().__init__(root)
        self.budget = budget
        self.error: HubError = HubError("the line is cut")
        self.sent: list[Range] = []

    def local_path(self, file: str) -> Path | None:
        return None

    def fetch(self, wanted: Range, stop: Event) -> Iterator[bytes]:
        file, position, end = wanted
        while position < end:
            step = min(PIECE, end - position)
            self.budget -= step
            if self.budget < 0:
                raise self.error
            yield self.read(file, position, position + step)
            self.sent.append(Range(file, position, position + step))
            position += step

    @property
    def sent_bytes(self) -> int:
        return sum(end - begin for _, begin, end in self.sent)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_NOTED", 4 * PIECE)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return build(tmp_path / "source")


@pytest.fixture
def task(source: Path) -> FileTask:
    """The file of a layer, whose tensors lie apart in the source."""
    components = open_checkpoint(source).components
    component = next(c for c in components if c.layer_id == 3)
    (plan,) = plan_files(component, components[component])
    return FileTask(plan.name, plan.size, tensors=plan.tensors)


def bring(task: FileTask, source: LocalSource, out: Path, jobs: int = 1) -> list[FinishedTask]:
    with OutputDirectory.hold(out, {"command": "test"}) as output:
        return fetch_tasks(
            [task],
            source=source,
            output=output,
            jobs=jobs,
            checksums=True,
            progress=Silent(),
            label="test",
            more_bytes=0,
        )


def parts(out: Path) -> dict[str, Path]:
    return {path.suffixes[-2]: path for path in (out / ".reshard-partial").glob("*.part")}


def interrupt(task: FileTask, source: Path, out: Path, budget: int) -> FarSource:
    far = FarSource(source, budget)
    with pytest.raises(HubError):
        bring(task, far, out)
    assert not (out / task.path).exists()
    return far


def test_tensors_land_in_their_places(tmp_path: Path, source: Path, task: FileTask) -> None:
    whole = FarSource(source)
    (done,) = bring(task, whole, tmp_path / "out", jobs=4)
    assert (done.how, done.path) == ("fetched", task.path)
    names = {tensor.name for tensor in task.tensors}
    original = {
        name: blob
        for shard in source.glob("*.safetensors")
        for name, blob in read_file(shard).items()
        if name in names
    }
    assert read_file(tmp_path / "out" / task.path) == original
    assert not (tmp_path / "out" / ".reshard-partial").exists()


def test_a_later_run_asks_for_the_rest_only(tmp_path: Path, source: Path, task: FileTask) -> None:
    bring(task, FarSource(source), tmp_path / "whole")
    sent = []
    for budget in (5500, 20_000, 1 << 60):
        far = FarSource(source, budget)
        try:
            bring(task, far, tmp_path / "out")
        except HubError:
            pass
        sent += far.sent
    assert len(sent) == len(set(sent))
    assert sum(end - begin for _, begin, end in sent) == sum(t.nbytes for t in task.tensors)
    out = (tmp_path / "out" / task.path).read_bytes()
    assert out == (tmp_path / "whole" / task.path).read_bytes()


def test_killed_before_the_end_was_noted(tmp_path: Path, source: Path) -> None:
    """What a killed process could not note of its request is fetched again, and no more."""
    out = tmp_path / "out"
    shard = next(source.glob("*.safetensors"))
    whole = FileTask("copy.safetensors", shard.stat().st_size, whole=shard.name)
    interrupt(whole, source, out, 9500)
    notes = parts(out)[".ranges"]
    lines = notes.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4  # what they are for, two notes on the way, one at the end
    notes.write_bytes(b"".join(lines[:-1]))
    far = FarSource(source)
    bring(whole, far, out)
    assert far.sent_bytes == whole.size - 8000
    assert (out / "copy.safetensors").read_bytes() == shard.read_bytes()


@pytest.mark.parametrize("torn", [b'["model', b"[]\n", b'["a", 1, null]\n', b"\xff\n", b"\0" * 9])
def test_torn_notes_are_cut(tmp_path: Path, source: Path, task: FileTask, torn: bytes) -> None:
    """Also twice: what is noted after a tear counts."""
    bring(task, FarSource(source), tmp_path / "whole")
    out = tmp_path / "out"
    sent = []
    for budget in (9500, 9500, 1 << 60):
        far = FarSource(source, budget)
        try:
            bring(task, far, out)
        except HubError:
            with open(parts(out)[".ranges"], "ab") as notes:
                notes.write(torn)
        sent += far.sent
    assert len(sent) == len(set(sent))
    assert (out / task.path).read_bytes() == (tmp_path / "whole" / task.path).read_bytes()


@pytest.mark.parametrize("what", ["other size", "other notes", "no notes", "other run"])
def test_what_does_not_fit_is_fetched_anew(
    tmp_path: Path, source: Path, task: FileTask, what: str
) -> None:
    out = tmp_path / "out"
    interrupt(task, source, out, 9500)
    data, notes = parts(out)[".safetensors"], parts(out)[".ranges"]
    if what == "other size":
        os.truncate(data, task.size - 1)
    elif what == "no notes":
        notes.unlink()
    elif what == "other notes":
        notes.write_bytes(b"0" * 64 + b"\n" + notes.read_bytes().partition(b"\n")[2])
    else:
        (out / ".reshard-partial" / "journal").unlink()
    far = FarSource(source)
    bring(task, far, out)
    assert far.sent_bytes == sum(tensor.nbytes for tensor in task.tensors)


def test_nothing_of_a_reply_that_was_not_asked_for_is_kept(
    tmp_path: Path, source: Path, task: FileTask
) -> None:
    """Who sends one wrong reply may have sent another: all of it comes anew."""
    out = tmp_path / "out"
    liar = FarSource(source, 9500)
    liar.error = HubReplyError("of another length")
    with pytest.raises(HubReplyError):
        bring(task, liar, out)
    assert ".ranges" not in parts(out)
    far = FarSource(source)
    bring(task, far, out)
    assert far.sent_bytes == sum(tensor.nbytes for tensor in task.tensors)


def test_links_in_the_place_of_parts_are_refused(
    tmp_path: Path, source: Path, task: FileTask
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    for link in (os.symlink, os.link):
        out = tmp_path / link.__name__
        interrupt(task, source, out, 9500)
        data = parts(out)[".safetensors"]
        data.unlink()
        link(victim, data)
        try:
            bring(task, FarSource(source), out)
        except OutputError:
            pass
        assert victim.read_bytes() == b"mine"


def test_checksum_of_a_whole_file(tmp_path: Path, source: Path) -> None:
    name = next(source.glob("*.safetensors")).name
    size = (source / name).stat().st_size
    out = tmp_path / "out"
    wrong = FileTask("copy.safetensors", size, whole=name, sha256="0" * 64)
    with pytest.raises(BundleError, match="as it arrived"):
        bring(wrong, FarSource(source), out)
    assert not any(out.rglob("*.safetensors"))
    assert not (out / "copy.safetensors").exists()
    (done,) = bring(FileTask("copy.safetensors", size, whole=name), FarSource(source), out)
    assert (out / "copy.safetensors").read_bytes() == (source / name).read_bytes()
    assert done.sha256 is not None
