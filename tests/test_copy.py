"""The copy engine: any ranges, in any files, arrive in order and whole; failures stop the rest."""

from __future__ import annotations

import hashlib
import tempfile
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.copy import FileTask, in_parallel, run_tasks, tensor_ranges
from reshard.errors import SourceChangedError
from reshard.header import TensorInfo, encode_header
from reshard.output import OutputDirectory
from reshard.progress import Silent
from reshard.source import CHUNK, LocalSource, Range

FILES = {"a": bytes(range(256)) * 13_000, "b": b"some bytes" * 7, "c": b""}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    directory = tmp_path_factory.mktemp("source")
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    return LocalSource(directory)


def ranges() -> st.SearchStrategy[list[Range]]:
    def within(name: str) -> st.SearchStrategy[Range]:
        offsets = st.integers(0, len(FILES[name]))
        return st.tuples(offsets, offsets).map(lambda pair: Range(name, *sorted(pair)))

    return st.lists(st.sampled_from(sorted(FILES)).flatmap(within), max_size=8)


@given(wanted=ranges())
def test_read_many_gives_the_ranges_in_order(source: LocalSource, wanted: list[Range]) -> None:
    pieces = [bytes(piece) for piece in source.read_many(wanted)]
    assert b"".join(pieces) == b"".join(FILES[r.file][r.begin : r.end] for r in wanted)
    assert all(len(piece) == CHUNK for piece in pieces[:-1])


def test_reading_past_the_end_is_noticed(source: LocalSource) -> None:
    with pytest.raises(SourceChangedError):
        list(source.read_many([Range("b", 0, 71)]))


@given(
    wanted=ranges(),
    jobs=st.integers(1, 3),
    checksums=st.booleans(),
)
def test_files_are_made_of_tensors_from_anywhere(
    source: LocalSource, wanted: list[Range], jobs: int, checksums: bool
) -> None:
    tensors = tuple(
        TensorInfo(str(number), "U8", (r.end - r.begin,), r.begin, r.end, r.file)
        for number, r in enumerate(wanted)
    )
    header = encode_header(tensors)
    data = b"".join(FILES[r.file][r.begin : r.end] for r in wanted)
    size = len(header) + len(data)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "out"
        with OutputDirectory.hold(root, {"command": "test"}) as output:
            done = run_tasks(
                [FileTask(name, size, tensors=tensors) for name in ("x", "y", "z")],
                source=source,
                output=output,
                jobs=jobs,
                checksums=checksums,
                progress=Silent(),
                label="test",
            )
        assert sorted(path.name for path in root.iterdir()) == ["x", "y", "z"]
        assert sorted(task.name for task in done) == ["x", "y", "z"]
        for task in done:
            content = (root / task.name).read_bytes()
            assert content == header + data
            expected = hashlib.sha256(content).hexdigest() if checksums else None
            assert (task.how, task.sha256) == ("written", expected)


@given(
    cuts=st.lists(st.integers(0, 100), min_size=2, max_size=10).map(sorted),
)
def test_neighbours_are_read_at_once(cuts: list[int]) -> None:
    tensors = [TensorInfo(str(a), "U8", (b - a,), a, b, "f") for a, b in pairwise(cuts)]
    merged = tensor_ranges(tensors)
    assert merged == ([Range("f", cuts[0], cuts[-1])] if cuts[0] < cuts[-1] else [])


def test_first_failure_stops_the_others() -> None:
    begun: list[int] = []

    def work(number: int, stop: Event) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        if number > 3:
            assert stop.wait(10)
        return number

    with pytest.raises(ValueError, match="three"):
        list(in_parallel(work, range(100), 2))
    assert len(begun) < 10
