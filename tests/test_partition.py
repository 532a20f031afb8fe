"""Which layers each stage owns: the engines' rules, given counts, and the balanced cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import PlanError, UsageError
from reshard.partition import (
    Partition,
    balanced_partition,
    even_partition,
    explicit_partition,
    parse_counts,
    parse_stages,
)

ENGINES = ("sglang", "vllm")


def check_whole(partition: Partition, layers: int, pp_size: int) -> None:
    """Stages are disjoint, ordered, complete and none is empty."""
    stages = [partition.layers(stage) for stage in range(pp_size)]
    assert len(partition.counts) == pp_size
    assert list(chain(*stages)) == list(range(layers))
    assert all(len(stage) > 0 for stage in stages)


# --- the engines' rules ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "pp_size", "sglang", "vllm"),
    [
        (8, 1, "8", "8"),
        (8, 2, "4,4", "4,4"),
        (8, 3, "2,3,3", "3,3,2"),
        (8, 8, "1,1,1,1,1,1,1,1", "1,1,1,1,1,1,1,1"),
        (9, 2, "4,5", "5,4"),
        (10, 3, "3,3,4", "3,4,3"),
        (30, 4, "7,7,8,8", "7,8,8,7"),
        (40, 3, "13,13,14", "13,14,13"),
        (40, 7, "5,5,6,6,6,6,6", "5,6,6,6,6,6,5"),
        (48, 5, "9,9,10,10,10", "9,10,10,10,9"),
        (60, 4, "15,15,15,15", "15,15,15,15"),
        (60, 8, "7,7,7,7,8,8,8,8", "7,7,7,8,8,8,8,7"),
        (61, 4, "15,15,15,16", "15,15,16,15"),
        (94, 4, "23,23,24,24", "23,24,24,23"),
        (94, 8, "11,11,12,12,12,12,12,12", "11,12,12,12,12,12,12,11"),
    ],
)
def test_known_splits(layers: int, pp_size: int, sglang: str, vllm: str) -> None:
    for engine, counts in (("sglang", sglang), ("vllm", vllm)):
        partition = even_partition(engine, layers, pp_size)
        assert partition == Partition(engine, parse_counts(counts))


@given(st.sampled_from(ENGINES), st.integers(1, 200), st.data())
def test_even_splits_are_whole_and_even(engine: str, layers: int, data: st.DataObject) -> None:
    pp_size = data.draw(st.integers(1, layers))
    partition = even_partition(engine, layers, pp_size)
    check_whole(partition, layers, pp_size)
    assert max(partition.counts) - min(partition.counts) <= 1
    if engine == "sglang":
        assert list(partition.counts) == sorted(partition.counts)
    else:
        assert partition.counts[-1] == min(partition.counts)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_stages_than_layers_are_refused(engine: str) -> None:
    with pytest.raises(UsageError, match="--pp-size 9: the model has only 8 layers"):
        even_partition(engine, 8, 9)
    for pp_size in (0, -1):
        with pytest.raises(UsageError, match="at least one stage"):
            even_partition(engine, 8, pp_size)


def test_layers_keep_their_numbers_in_the_checkpoint() -> None:
    partition = even_partition("sglang", 10, 3)
    assert [partition.layers(n) for n in range(3)] == [range(3), range(3, 6), range(6, 10)]


# --- given counts ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_given_counts_are_kept(counts: list[int]) -> None:
    partition = explicit_partition(counts, sum(counts), len(counts))
    assert partition == Partition("explicit", tuple(counts))
    check_whole(partition, sum(counts), len(counts))


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([4, 4], "--layers 4,4: 2 counts for 3 stages"),
        ([2, 2, 2, 2], "--layers 2,2,2,2: 4 counts for 3 stages"),
        ([], "0 counts for 3 stages"),
        ([2, 2, 3], "--layers 2,2,3: the sum is 7, the model has 8 layers"),
        ([3, 3, 3], "the sum is 9, the model has 8 layers"),
        ([4, 0, 4], "every stage needs at least one layer"),
        ([1, -1, 8], "every stage needs at least one layer"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts: list[int], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        explicit_partition(counts, 8, 3)
    assert words in refusal.value.message


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8", (8,)),
        ("23,24,24,23", (23, 24, 24, 23)),
        (" 3 , 4,\t1", (3, 4, 1)),
        ("0,8", (0, 8)),
        ("007", (7,)),
        ("999999", (999_999,)),
    ],
)
def test_parse_counts(text: str, counts: tuple[int, ...]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    "text",
    ["", ",", "3,", ",3", "3,,4", "3;4", "3 4", "a", "-1,9", "+3", "3.0", "1_0", "0x3", "\u0663"]
    + ["\u00b2", "9" * 5000, "1000000"],
)
def test_parse_counts_refuses_anything_else(text: str) -> None:
    with pytest.raises(UsageError, match="give counts like 23,24,24,23") as refusal:
        parse_counts(text)
    assert len(refusal.value.message) < 250


# --- stage numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "stages"),
    [
        (["2"], (2,)),
        (["0", "2-3"], (0, 2, 3)),
        (["0,1"], (0, 1)),
        (["0-3"], (0, 1, 2, 3)),
        (["3", "0", "3"], (0, 3)),
        (["1-2,0-1"], (0, 1, 2)),
        (["2-2"], (2,)),
        ([" 1 , 2 - 3 "], (1, 2, 3)),
        (["all"], (0, 1, 2, 3)),
        (["all", "2"], (0, 1, 2, 3)),
    ],
)
def test_parse_stages(texts: list[str], stages: tuple[int, ...]) -> None:
    assert parse_stages(texts, 4) == stages


def test_range_of_stages_that_runs_backwards() -> None:
    with pytest.raises(UsageError, match="--stage 3-2: the range runs backwards"):
        parse_stages(["3-2"], 4)


@pytest.mark.parametrize("text", ["4", "0-4", "9-9", "999999"])
def test_stages_that_the_set_does_not_have(text: str) -> None:
    with pytest.raises(UsageError, match=f"--stage {text}: the stages are 0 to 3"):
        parse_stages([text], 4)


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "-", "1-2-3", "0,", "1.0", "ALL", "\u0663", "9" * 5000]
)
def test_parse_stages_refuses_anything_else(text: str) -> None:
    with pytest.raises(UsageError, match="give a number, a range like 0-3, or all"):
        parse_stages([text], 4)


# --- the balanced cut -----------------------------------------------------------------------------


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut `total` layers into `parts` stages, in lexicographic order."""
    for cuts in combinations(range(1, total), parts - 1):
        bounds = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(bounds))


def largest(counts: Sequence[int], layer_bytes: Sequence[int], stage_bytes: Sequence[int]) -> int:
    start, sizes = 0, []
    for count, beside in zip(counts, stage_bytes, strict=True):
        sizes.append(beside + sum(layer_bytes[start : start + count]))
        start += count
    return max(sizes)


def best(
    layer_bytes: Sequence[int], stage_bytes: Sequence[int], first_minimum: int
) -> tuple[int, ...]:
    """The smallest largest stage, and among those the first counts, by looking at all."""
    allowed = [c for c in compositions(len(layer_bytes), len(stage_bytes)) if c[0] >= first_minimum]
    return min(allowed, key=lambda counts: (largest(counts, layer_bytes, stage_bytes), counts))


@st.composite
def balance_problems(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Bytes of layers and of what stands beside them, and a minimum that can be met."""
    sizes = st.integers(0, draw(st.sampled_from([1, 3, 1000])))
    layer_bytes = draw(st.lists(sizes, min_size=1, max_size=9))
    stage_bytes = draw(st.lists(sizes, min_size=1, max_size=min(5, len(layer_bytes))))
    first_minimum = draw(st.integers(0, len(layer_bytes) - len(stage_bytes) + 1))
    return layer_bytes, stage_bytes, first_minimum


@given(balance_problems())
def test_balanced_is_the_first_of_the_best(problem: tuple[list[int], list[int], int]) -> None:
    layer_bytes, stage_bytes, first_minimum = problem
    partition = balanced_partition(layer_bytes, stage_bytes, first_minimum)
    assert partition == Partition("balanced", best(layer_bytes, stage_bytes, first_minimum))


def test_the_heavier_ends_get_fewer_layers() -> None:
    partition = balanced_partition([10] * 12, [20, 0, 0, 20])
    assert partition.counts == (2, 4, 4, 2)
    assert balanced_partition([10] * 12, [0, 0, 0, 0]).counts == (3, 3, 3, 3)
    assert balanced_partition([10] * 10, [0, 0, 0, 0]).counts == (1, 3, 3, 3)


def test_the_first_stage_keeps_its_minimum_though_it_is_heavy() -> None:
    assert balanced_partition([10] * 8, [1000, 0], 3).counts == (3, 5)
    assert balanced_partition([10] * 8, [1000, 0]).counts == (1, 7)
    # What is best with the minimum: the last stage may be as large as the first one must be.
    assert balanced_partition([10, 10, 10, 1, 7, 7, 7], [0, 0, 0]).counts == (2, 3, 2)
    assert balanced_partition([10, 10, 10, 1, 7, 7, 7], [0, 0, 0], 3).counts == (3, 1, 3)


def test_a_heavy_stage_gets_the_lighter_layer() -> None:
    """Filling stages one by one, as far as they go, would miss this."""
    assert balanced_partition([6, 11, 6, 13], [7, 18, 2]).counts == (2, 1, 1)


def test_a_minimum_that_cannot_be_met_is_refused() -> None:
    assert balanced_partition([1] * 4, [0, 0], 3).counts == (3, 1)
    with pytest.raises(PlanError, match="4 layers cannot give stage 0 its 4"):
        balanced_partition([1] * 4, [0, 0], 4)


def test_balanced_refuses_more_stages_than_layers() -> None:
    with pytest.raises(UsageError, match="the model has only 2 layers"):
        balanced_partition([1, 1], [0, 0, 0])


def test_balancing_a_large_model_is_quick_and_exact() -> None:
    """True sizes need big integers and a search that does not walk byte by byte."""
    layer_bytes = [13_150_315_392, 13_150_315_392, 13_150_315_392, 13_124_002_816] * 15
    stage_bytes = [2_946_258_400, 0, 0, 17_259_619_328]
    partition = balanced_partition(layer_bytes, stage_bytes)
    limit = largest(partition.counts, layer_bytes, stage_bytes)
    others = (c for c in compositions(60, 4) if max(c) <= 18)
    assert limit == min(largest(c, layer_bytes, stage_bytes) for c in others)
