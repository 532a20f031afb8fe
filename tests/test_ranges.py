"""Every wanted byte comes once and to its place, by few requests and with few others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from reshard.ranges import MAX_REQUEST, Request, Segment, plan_requests, remaining, scatter

_SIZE = 1500
_FILES = {name: bytes((7 * i + ord(name)) % 251 for i in range(_SIZE)) for name in "ab"}

offsets = st.integers(0, _SIZE)
bounds = st.tuples(offsets, offsets).map(lambda pair: (min(pair), max(pair)))
file_names = st.sampled_from(sorted(_FILES))


@st.composite
def any_segments(draw: st.DrawFn) -> list[Segment]:
    """Ranges in any order, also empty or overlapping ones, which no checkpoint has."""
    return _in_a_row(draw(st.lists(st.tuples(file_names, bounds), max_size=5)))


@st.composite
def apart(draw: st.DrawFn) -> list[Segment]:
    """What an output file is made of: ranges in any order, with small and large gaps between."""
    wanted = []
    for file in draw(st.sampled_from(["a", "b", "ab"])):
        position = 0
        for _ in range(draw(st.integers(1, 6))):
            begin = min(_SIZE, position + draw(st.integers(0, 4) | st.integers(0, 300)))
            position = min(_SIZE, begin + draw(st.integers(0, 600)))
            wanted.append((file, (begin, position)))
    return _in_a_row(draw(st.permutations(wanted)))


max_bytes = st.sampled_from([7, 100, 1000, MAX_REQUEST])


def _in_a_row(wanted: Sequence[tuple[str, tuple[int, int]]]) -> list[Segment]:
    found = []
    at = 0
    for file, (begin, end) in wanted:
        found.append(Segment(file, begin, end, at))
        at += end - begin
    return found


def expected(of: Sequence[Segment]) -> bytes:
    return b"".join(_FILES[s.file][s.begin : s.end] for s in of)


def pieces(request: Request, length: int) -> Iterator[bytes]:
    """The bytes of a request as they may come over the network."""
    for begin in range(request.begin, request.end, length):
        yield _FILES[request.file][begin : min(request.end, begin + length)]


def deliver(requests: Sequence[Request], length: int, out: bytearray, times: list[int]) -> None:
    """Write what requests bring into `out`, and count how often each byte is written."""
    for request in requests:
        for at, data in scatter(request, pieces(request, length)):
            out[at : at + len(data)] = data
            for position in range(at, at + len(data)):
                times[position] += 1


def places(of: Sequence[Segment]) -> list[tuple[str, int, int]]:
    """Each byte of segments: where it lies, and where it goes."""
    return sorted((s.file, b, s.at + b - s.begin) for s in of for b in range(s.begin, s.end))


@given(apart() | any_segments(), max_bytes, st.integers(1, 9) | st.integers(1, 2000))
def test_every_wanted_byte_arrives_once_and_at_its_place(
    wanted: list[Segment], limit: int, length: int
) -> None:
    whole = expected(wanted)
    out, times = bytearray(len(whole)), [0] * len(whole)
    deliver(plan_requests(wanted, limit), length, out, times)
    assert times == [1] * len(whole)
    assert bytes(out) == whole


@given(apart(), max_bytes)
def test_requests_are_small_enough_in_order_and_bring_little_else(
    wanted: list[Segment], limit: int
) -> None:
    requests = plan_requests(wanted, limit)
    assert [(r.file, r.begin) for r in requests] == sorted((r.file, r.begin) for r in requests)
    for request in requests:
        assert 0 < request.end - request.begin <= limit
        assert (request.begin, request.end) == (
            request.segments[0].begin,
            request.segments[-1].end,
        )
        inside = [(s.begin, s.end) for s in request.segments]
        assert inside == sorted(inside)
        assert all(s.file == request.file for s in request.segments)
    brought = sum(r.end - r.begin for r in requests)
    total = sum(s.end - s.begin for s in wanted)
    assert 0 <= (brought - total) * 256 <= total


@given(apart())
def test_neighbours_are_one_request(wanted: list[Segment]) -> None:
    starts = {(s.file, s.begin) for s in wanted if s.begin < s.end}
    ends = {(s.file, s.end) for s in wanted if s.begin < s.end}
    assert len(plan_requests(wanted)) <= len(starts - ends)


def test_gaps_are_fetched_to_save_requests_while_they_are_small() -> None:
    gap, wanted = 256 << 10, 1 << 30
    limit = 4 * wanted

    def after(gap: int, size: int = wanted) -> int:
        first = Segment("a", 0, wanted, 0)
        return len(
            plan_requests([first, Segment("a", wanted + gap, wanted + gap + size, 0)], limit)
        )

    assert after(gap) == 1
    assert after(gap + 1) == 2
    assert len(plan_requests([Segment("a", 0, 100, 0), Segment("a", 101, 200, 100)])) == 2
    assert len(plan_requests([Segment("a", 0, 200, 0), Segment("a", 201, 301, 200)])) == 1
    others = [Segment("a", 0, wanted, 0), Segment("b", wanted, 2 * wanted, wanted)]
    assert len(plan_requests(others, limit)) == 2


def test_large_ranges_are_cut_at_the_limit() -> None:
    requests = plan_requests([Segment("a", 5, 5 + 2 * MAX_REQUEST + 1, 0)])
    assert [r.end - r.begin for r in requests] == [MAX_REQUEST, MAX_REQUEST, 1]
    assert [r.segments[0].at for r in requests] == [0, MAX_REQUEST, 2 * MAX_REQUEST]


def test_nothing_wanted_is_no_request() -> None:
    assert plan_requests([]) == []
    assert plan_requests([Segment("a", 5, 5, 0)]) == []


@given(apart() | any_segments(), st.lists(st.tuples(file_names, bounds), max_size=8))
def test_remaining_is_exactly_what_is_not_done(
    wanted: list[Segment], done: list[tuple[str, tuple[int, int]]]
) -> None:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for file, pair in done:
        ranges.setdefault(file, []).append(pair)
    here = {(file, position) for file, pair in done for position in range(*pair)}
    left = list(remaining(wanted, ranges))
    assert places(left) == [p for p in places(wanted) if p[:2] not in here]
    assert all(s.begin < s.end for s in left)


@given(apart(), max_bytes, st.data())
def test_what_was_broken_off_is_completed(
    wanted: list[Segment], limit: int, data: st.DataObject
) -> None:
    """Some requests were answered, some in part, some not at all; a second run asks for the rest."""
    whole = expected(wanted)
    out, times = bytearray(len(whole)), [0] * len(whole)
    done: dict[str, list[tuple[int, int]]] = {}
    for request in plan_requests(wanted, limit):
        end = data.draw(st.integers(request.begin, request.end))
        arrived = _FILES[request.file][request.begin : end]
        for at, piece in scatter(request, [arrived]):
            out[at : at + len(piece)] = piece
        done.setdefault(request.file, []).append((request.begin, end))
    deliver(plan_requests(remaining(wanted, done), limit), 100, out, times)
    assert bytes(out) == whole
    assert max(times, default=0) <= 1
