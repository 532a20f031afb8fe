"""Which requests bring which bytes: ranges of a far file, joined into few large ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MAX_REQUEST = 256 << 20
"""Bytes of one request: large, because the Hub counts requests, and each takes two round trips."""

_MAX_GAP = 256 << 10
"""Bytes that may be fetched for nothing, to save a request."""

_WANTED_PER_GAP = 256
"""And how many wanted bytes there must be for each of these: so they stay below 0.4 %."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes `begin` to `end` of a source file, which go to offset `at` of an output file."""

    file: str
    begin: int
    end: int
    at: int

    def part(self, begin: int, end: int) -> Segment:
        """Its bytes `begin` to `end`, which are offsets of the source file too."""
        return Segment(self.file, begin, end, self.at + begin - self.begin)


@dataclass(frozen=True, slots=True)
class Request:
    """The bytes `begin` to `end` of a file, of which `segments`, in order, are wanted."""

    file: str
    begin: int
    end: int
    segments: tuple[Segment, ...]


def plan_requests(segments: Iterable[Segment], max_bytes: int = MAX_REQUEST) -> list[Request]:
    """Requests of at most `max_bytes` that bring all segments, in the order of the source."""
    pieces = list(_pieces(sorted(segments, key=lambda s: (s.file, s.begin)), max_bytes))
    budget = sum(piece.end - piece.begin for piece in pieces) // _WANTED_PER_GAP
    requests: list[list[Segment]] = []
    for piece in pieces:
        if requests:
            first, last = requests[-1][0], requests[-1][-1]
            gap = piece.begin - last.end
            fits = piece.file == last.file and piece.end - first.begin <= max_bytes
            if fits and 0 <= gap <= min(_MAX_GAP, budget):
                requests[-1].append(piece)
                budget -= gap
                continue
        requests.append([piece])
    return [Request(r[0].file, r[0].begin, r[-1].end, tuple(r)) for r in requests]


def remaining(
    segments: Iterable[Segment], done: Mapping[str, Iterable[tuple[int, int]]]
) -> Iterator[Segment]:
    """What is left of `segments` without the ranges `done` of each file."""
    done = {file: sorted(ranges) for file, ranges in done.items()}
    for segment in segments:
        begin = segment.begin
        for done_begin, done_end in done.get(segment.file, ()):
            if begin < done_begin < segment.end:
                yield segment.part(begin, done_begin)
            if done_begin < segment.end:
                begin = max(begin, done_end)
        if begin < segment.end:
            yield segment.part(begin, segment.end)


def scatter(
    request: Request, pieces: Iterable[bytes | memoryview]
) -> Iterator[tuple[int, memoryview]]:
    """The wanted bytes among those that a request brings, each with its offset in the output."""
    position = request.begin
    wanted = iter(request.segments)
    segment = next(wanted)
    for piece in pieces:
        view = memoryview(piece)
        while view:
            skipped = min(len(view), max(0, segment.begin - position))
            taken = min(len(view) - skipped, segment.end - position - skipped)
            if taken:
                begin = position + skipped
                yield segment.at + begin - segment.begin, view[skipped : skipped + taken]
            position += skipped + taken
            view = view[skipped + taken :]
            if position == segment.end:
                segment = next(wanted, segment)


def _pieces(segments: Iterable[Segment], max_bytes: int) -> Iterator[Segment]:
    """Segments cut where they are longer than a request."""
    for s in segments:
        for begin in range(s.begin, s.end, max_bytes):
            yield s.part(begin, min(s.end, begin + max_bytes))
