"""Which decoder layers each pipeline stage owns. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from reshard.errors import PlanError, UsageError, quoted


@dataclass(frozen=True, slots=True)
class Partition:
    """Consecutive layers per stage. `rule`: sglang, vllm, explicit or balanced."""

    rule: str
    counts: tuple[int, ...]

    def layers(self, stage: int) -> range:
        """The layers of a stage, in checkpoint-global numbers."""
        start = sum(self.counts[:stage])
        return range(start, start + self.counts[stage])


def even_partition(rule: str, layers: int, pp_size: int) -> Partition:
    """The engine's own default for `layers` over `pp_size` stages.

    sglang: a remainder goes one each to the last stages (`get_pp_indices` in
    `sglang/srt/distributed/utils.py`). vllm: to the stages just before the last one (function of
    the same name in `vllm/distributed/utils.py`).

    Raises `UsageError` where there are more stages than layers.
    """
    if pp_size < 1:
        raise UsageError(f"--pp-size {pp_size}: at least one stage is needed")
    if pp_size > layers:
        raise UsageError(f"--pp-size {pp_size}: the model has only {layers} layers")
    base, remainder = divmod(layers, pp_size)
    first_extra = pp_size - remainder - (1 if rule == "vllm" and remainder else 0)
    extra = range(first_extra, first_extra + remainder)
    return Partition(rule, tuple(base + (stage in extra) for stage in range(pp_size)))


def explicit_partition(counts: Sequence[int], layers: int, pp_size: int) -> Partition:
    """The given counts. Raises `UsageError` unless they are `pp_size` >= 1 and sum to `layers`."""
    shown = ",".join(map(str, counts))
    if len(counts) != pp_size:
        raise UsageError(f"--layers {shown}: {len(counts)} counts for {pp_size} stages")
    if min(counts) < 1:
        raise UsageError(f"--layers {shown}: every stage needs at least one layer")
    if sum(counts) != layers:
        raise UsageError(
            f"--layers {shown}: the sum is {sum(counts)}, the model has {layers} layers"
        )
    return Partition("explicit", tuple(counts))


def parse_counts(text: str) -> tuple[int, ...]:
    """`23,24,24,23` -> counts. Raises `UsageError` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise UsageError(f"--layers {quoted(text)}: give counts like 23,24,24,23")
    return tuple(int(part) for part in parts)


def balanced_partition(
    layer_bytes: Sequence[int], stage_bytes: Sequence[int], first_minimum: int = 1
) -> Partition:
    """The partition whose largest stage is smallest; among those, the smallest counts first.

    `layer_bytes`: bytes of each layer; `stage_bytes`: what each stage holds beside its layers;
    `first_minimum`: layers that stage 0 must own at least.

    Raises `UsageError` where there are more stages than layers, `PlanError` where the minimum
    cannot be met.
    """
    layers, pp_size = len(layer_bytes), len(stage_bytes)
    if pp_size > layers:
        raise UsageError(f"--pp-size {pp_size}: the model has only {layers} layers")
    minimum = [max(first_minimum, 1), *[1] * (pp_size - 1)]
    if sum(minimum) > layers:
        raise PlanError(
            f"{layers} layers cannot give stage 0 its {minimum[0]} and {pp_size - 1} others one each"
        )
    prefix = [0, *accumulate(layer_bytes)]
    # largest[stage][start]: the largest stage where `stage` and those after it share the layers
    # from `start` on, cut as well as can be; one dimension at a time, from the last stage back.
    unreachable = prefix[-1] + sum(stage_bytes) + 1
    largest = [[unreachable] * (layers + 1) for _ in range(pp_size)]
    largest.append([unreachable] * layers + [0])
    for stage in range(pp_size - 1, -1, -1):
        for start in range(layers):
            best = unreachable
            for end in range(start + minimum[stage], layers + 1):
                own = prefix[end] - prefix[start] + stage_bytes[stage]
                if own >= best:
                    break
                best = min(best, max(own, largest[stage + 1][end]))
            largest[stage][start] = best
    limit, start = largest[0][0], 0
    counts = []
    for stage in range(pp_size):
        end = start + minimum[stage]
        while largest[stage + 1][end] > limit:
            end += 1
        counts.append(end - start)
        start = end
    return Partition("balanced", tuple(counts))


def parse_stages(texts: Sequence[str], pp_size: int) -> tuple[int, ...]:
    """`["0", "2-3"]`, `["0,1"]` or `["all"]` -> stage numbers in order.

    Raises `UsageError` for anything else, and for stages that the set does not have.
    """
    stages: set[int] = set()
    for part in ",".join(texts).split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if part.strip() == "all":
            stages.update(range(pp_size))
            continue
        last = last if dash else first
        if not all(n.isascii() and n.isdigit() and len(n) < 7 for n in (first, last)):
            raise UsageError(f"--stage {quoted(part)}: give a number, a range like 0-3, or all")
        if int(first) > int(last):
            raise UsageError(f"--stage {quoted(part)}: the range runs backwards")
        if int(last) >= pp_size:
            raise UsageError(f"--stage {quoted(part)}: the stages are 0 to {pp_size - 1}")
        stages.update(range(int(first), int(last) + 1))
    return tuple(sorted(stages))
