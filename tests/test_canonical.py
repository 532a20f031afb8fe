"""Canonical files: the order of tensors, where files are cut, and what they are called."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import build_plan, open_checkpoint, split
from reshard.canonical import FilePlan, canonical_order, plan_files
from reshard.header import DTYPE_BITS, TensorInfo, encode_header
from reshard.names import Component, natural_key
from tests.checkpoints import build, inventory, read_dir

LAYER = Component("layer", 12)
E = "m.layers.12.mlp.experts"


def tensor(name: str, shape: tuple[int, ...] = (4,), dtype: str = "U8", at: int = 0) -> TensorInfo:
    size = DTYPE_BITS.get(dtype, 8)
    for dimension in shape:
        size *= dimension
    return TensorInfo(name, dtype, shape, at, at + size // 8, "source.safetensors")


def order(tensors: list[TensorInfo]) -> list[list[str]]:
    """Names by group."""
    return [[t.name for t in group] for group in canonical_order(tensors)]


def expert(number: int, proj: str, suffix: str = "weight", **kind: object) -> TensorInfo:
    return tensor(f"{E}.{number}.{proj}_proj.{suffix}", **kind)  # type: ignore[arg-type]


def run(experts: int, *projections: str, suffix: str = "weight") -> list[str]:
    return [f"{E}.{e}.{proj}_proj.{suffix}" for e in range(experts) for proj in projections]


# --- order ----------------------------------------------------------------------------------------


def test_larger_powers_of_two_come_first() -> None:
    sizes = {"a": 1, "b": 6, "c": 4, "d": 12, "e": 4096, "f": 0, "g": 8192 + 4096, "h": 3, "i": 8}
    tensors = [tensor(name, (size,)) for name, size in sizes.items()]
    assert [name for (name,) in order(tensors)] == ["f", "e", "g", "i", "c", "d", "b", "a", "h"]


def test_equal_powers_are_in_natural_order() -> None:
    names = ["x.1", "x.2", "x.10", "x.010", "x.1a", "X", "x", "\u00e9", "y"]
    ordered = [name for (name,) in order([tensor(name) for name in names])]
    assert ordered == ["X", "x", "x.1", "x.1a", "x.2", "x.010", "x.10", "y", "\u00e9"]


def test_a_run_of_gates_and_ups_and_one_of_downs() -> None:
    tensors = [expert(e, proj) for proj in ("up", "down", "gate") for e in (3, 10, 1, 0, 2)]
    tensors += [expert(e, proj) for proj in ("up", "down", "gate") for e in (4, 5, 6, 7, 8, 9)]
    assert order(tensors) == [run(11, "down"), run(11, "gate", "up")][::-1]


def test_the_first_member_names_a_run() -> None:
    """Between runs of equal size, `down` of expert 0 sorts before its `gate`."""
    ups = [expert(e, proj) for e in range(4) for proj in ("gate", "up")]
    halves, equals = ([expert(e, "down", shape=(n,)) for e in range(4)] for n in (4, 8))
    assert order(ups + halves) == [run(4, "gate", "up"), run(4, "down")]
    assert order(ups + equals) == [run(4, "down"), run(4, "gate", "up")]


def test_every_suffix_is_a_run_of_its_own() -> None:
    tensors = [
        expert(e, proj, suffix, shape=shape)
        for e in range(2)
        for suffix, shape in (("weight", (16,)), ("weight_scale_inv", ()), ("a.b", (4,)))
        for proj in ("gate", "up")
    ]
    assert order(tensors) == [
        run(2, "gate", "up"),
        run(2, "gate", "up", suffix="a.b"),
        run(2, "gate", "up", suffix="weight_scale_inv"),
    ]


def test_modules_do_not_mix() -> None:
    other = [
        tensor(t.name.replace("m.", "mtp.", 1)) for t in (expert(0, "down"), expert(1, "down"))
    ]
    tensors = [expert(0, "down"), *other, expert(1, "down")]
    assert order(tensors) == [run(2, "down"), [t.name for t in other]]


@pytest.mark.parametrize(
    "broken",
    [
        [expert(0, "gate"), expert(0, "up"), expert(1, "gate")],
        [expert(e, proj) for e in (0, 1, 3) for proj in ("gate", "up")],
        [expert(e, proj) for e in (1, 2) for proj in ("gate", "up")],
        [expert(e, "gate") for e in range(3)],
        [expert(e, "up") for e in range(3)],
        [expert(0, "gate"), expert(1, "up")],
        [expert(1, "down"), expert(2, "down")],
        [expert(0, "down"), expert(1, "down", shape=(2, 2))],
        [expert(0, "down"), expert(1, "down", shape=(8,))],
        [expert(0, "down"), expert(1, "down", dtype="I8")],
        [expert(0, "gate", shape=(2, 3)), expert(0, "up", shape=(3, 2))],
        [expert(0, "down", dtype="F8_E4M3"), expert(1, "down", dtype="F8_E5M2")],
    ],
)
def test_a_broken_run_is_single_tensors(broken: list[TensorInfo]) -> None:
    groups = order(broken)
    assert sorted(len(group) for group in groups) == [1] * len(broken)
    assert sorted(name for (name,) in groups) == sorted(t.name for t in broken)


def test_a_dtype_of_the_future_is_one_run_only_at_one_size() -> None:
    def down(number: int, size: int) -> TensorInfo:
        return TensorInfo(f"{E}.{number}.down_proj.weight", "F31", (4,), 0, size, "")

    assert order([down(0, 4), down(1, 4)]) == [run(2, "down")]
    assert len(order([down(0, 4), down(1, 8)])) == 2


def test_a_broken_run_leaves_the_others_whole() -> None:
    downs = [expert(e, "down") for e in range(3)]
    tensors = [*downs, expert(0, "gate"), expert(1, "up")]
    assert sorted(map(len, order(tensors))) == [1, 1, 3]


def test_a_single_expert_is_a_run() -> None:
    assert order([expert(0, "up"), expert(0, "gate")]) == [run(1, "gate", "up")]


def test_numbers_that_are_no_expert_numbers() -> None:
    names = [f"{E}.00.down_proj.weight", f"{E}.0.down_proj.weight", f"{E}.1.down_proj.weight"]
    groups = order([tensor(name) for name in names])
    assert groups == [names[1:], names[:1]]


def test_a_whole_layer() -> None:
    """The order that a released layer gets, spelled out."""
    prefix = "model.language_model.layers.3."
    names = {n: t for n, t in inventory("Qwen3.5-35B-A3B").items() if n.startswith(prefix)}
    ordered = [name for (name,) in order([tensor(n, s, d) for n, (d, s) in names.items()])]
    assert [name.removeprefix(prefix) for name in ordered] == [
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "self_attn.q_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.shared_expert.down_proj.weight",
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "mlp.gate.weight",
        "input_layernorm.weight",
        "mlp.shared_expert_gate.weight",
        "post_attention_layernorm.weight",
        "self_attn.k_norm.weight",
        "self_attn.q_norm.weight",
    ]


# --- properties -----------------------------------------------------------------------------------

DTYPES = ("BOOL", "U8", "F8_E4M3", "BF16", "F32", "I64", "C64")


@st.composite
def layers(draw: st.DrawFn) -> list[TensorInfo]:
    """Tensors of one component: singles, whole runs and broken ones, in any order."""
    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 64, 96]), max_size=3).map(tuple)
    kinds = st.tuples(shapes, st.sampled_from(DTYPES))
    tensors = {}
    for name in draw(st.lists(st.text("ab.01", max_size=5), unique=True, max_size=10)):
        tensors[name] = tensor(name, *draw(kinds))
    for suffix in draw(st.sets(st.sampled_from(["weight", "scale", "zeros"]))):
        kind = draw(kinds)
        for name in run(draw(st.integers(1, 5)), "gate", "up", "down", suffix=suffix):
            odd = draw(st.integers(0, 30))
            if odd != 0:
                tensors[name] = tensor(name, *(draw(kinds) if odd == 1 else kind))
    return draw(st.permutations(list(tensors.values())))


def starts(file: FilePlan) -> dict[str, int]:
    """Where each tensor's data starts in the file."""
    position, found = file.header_bytes, {}
    for t in file.tensors:
        found[t.name] = position
        position += t.nbytes
    assert position == file.size
    return found


@given(layers(), st.integers(1, 10_000))
def test_every_tensor_starts_at_a_multiple_of_its_item_size(
    tensors: list[TensorInfo], max_bytes: int
) -> None:
    for file in plan_files(LAYER, tensors, max_bytes):
        at = starts(file)
        for t in file.tensors:
            assert at[t.name] % (DTYPE_BITS[t.dtype] // 8) == 0


@given(layers())
def test_whole_pages_start_at_page_boundaries(tensors: list[TensorInfo]) -> None:
    (file,) = plan_files(LAYER, tensors)
    at = starts(file)
    for group in canonical_order(tensors):
        if sum(t.nbytes for t in group) % 4096 == 0:
            assert at[group[0].name] % 4096 == 0


@given(layers(), st.randoms(use_true_random=False), st.integers(1, 2000))
def test_files_do_not_depend_on_the_order_of_their_tensors(
    tensors: list[TensorInfo], random: Random, max_bytes: int
) -> None:
    files = plan_files(LAYER, tensors, max_bytes)
    random.shuffle(tensors)
    assert plan_files(LAYER, tensors, max_bytes) == files


@given(layers())
def test_files_do_not_depend_on_where_the_tensors_lay(tensors: list[TensorInfo]) -> None:
    moved = [TensorInfo(t.name, t.dtype, t.shape, 9, 9 + t.nbytes, "x") for t in tensors]
    (here,), (there,) = plan_files(LAYER, tensors), plan_files(LAYER, moved)
    assert here.header_sha256 == there.header_sha256
    assert [t.name for t in here.tensors] == [t.name for t in there.tensors]


@given(layers(), st.integers(1, 2000))
def test_files_hold_every_tensor_once_and_are_cut_greedily(
    tensors: list[TensorInfo], max_bytes: int
) -> None:
    files = plan_files(LAYER, tensors, max_bytes)
    groups = canonical_order(tensors)
    assert [t for file in files for t in file.tensors] == [t for group in groups for t in group]
    sizes = {group[0].name: sum(t.nbytes for t in group) for group in groups}
    for file, following in pairwise(files):
        assert file.tensor_bytes + sizes[following.tensors[0].name] > max_bytes
    for file in files:
        only_group = file.tensors and sizes[file.tensors[0].name] == file.tensor_bytes
        assert file.tensor_bytes <= max_bytes or only_group


@given(layers())
def test_groups_are_in_order_of_power_and_name(tensors: list[TensorInfo]) -> None:
    def key(group: tuple[TensorInfo, ...]) -> tuple[object, ...]:
        size = sum(t.nbytes for t in group)
        zeros = len(bin(size)) - len(bin(size).rstrip("0")) if size else 99
        return (-zeros, natural_key(group[0].name))

    groups = canonical_order(tensors)
    assert groups == sorted(groups, key=key)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "name"),
    [
        (Component("layer", 0), "model-layer-00000.safetensors"),
        (Component("layer", 93), "model-layer-00093.safetensors"),
        (Component("visual"), "model-visual.safetensors"),
        (Component("embed"), "model-embed.safetensors"),
        (Component("head"), "model-head.safetensors"),
        (Component("mtp"), "model-mtp.safetensors"),
    ],
)
def test_a_component_in_one_file(component: Component, name: str) -> None:
    (file,) = plan_files(component, [tensor("a"), tensor("b", (8,))])
    assert (file.name, file.component) == (name, component)
    assert [t.name for t in file.tensors] == ["b", "a"]
    header = encode_header(file.tensors)
    assert file.header_bytes == len(header) == 4096
    assert file.header_sha256 == hashlib.sha256(header).hexdigest()
    assert (file.tensor_bytes, file.size) == (12, 4096 + 12)


def test_a_component_in_several_files() -> None:
    tensors = [tensor(f"t.{n}", (4,)) for n in range(11)]
    files = plan_files(LAYER, tensors, max_bytes=19)
    assert [file.name for file in files] == [
        "model-layer-00012-00001-of-00003.safetensors",
        "model-layer-00012-00002-of-00003.safetensors",
        "model-layer-00012-00003-of-00003.safetensors",
    ]
    numbers = [[int(t.name[2:]) for t in file.tensors] for file in files]
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_the_limit_itself_fits() -> None:
    tensors = [tensor(f"t.{n}") for n in range(3)]
    assert len(plan_files(LAYER, tensors, max_bytes=12)) == 1
    assert [f.tensor_bytes for f in plan_files(LAYER, tensors, max_bytes=11)] == [8, 4]


def test_a_run_is_never_cut() -> None:
    tensors = [expert(e, "down") for e in range(8)] + [tensor("a", (16,)), tensor("b")]
    files = plan_files(LAYER, tensors, max_bytes=20)
    assert [[t.name for t in file.tensors] for file in files] == [run(8, "down"), ["a", "b"]]
    assert files[0].tensor_bytes == 32


def test_the_limit_is_20_gb_of_tensors() -> None:
    half = tensor("a", (10_000_000_000,))
    assert len(plan_files(LAYER, [half, tensor("b", (10_000_000_000,))])) == 1
    assert len(plan_files(LAYER, [half, tensor("b", (10_000_000_001,))])) == 2
    assert len(plan_files(LAYER, [tensor("a", (50_000_000_000,))])) == 1


def test_a_written_run_is_one_fused_tensor(tmp_path: Path) -> None:
    """What lies in the file is `[E, 2, I, H]` and `[E, H, I]`, byte for byte."""
    source = build(tmp_path / "source", weights="fp8", experts=12)
    original = read_dir(source)
    split(build_plan(open_checkpoint(source), 2), tmp_path / "out")
    for layer in range(8):
        (path,) = (tmp_path / "out").glob(f"stage-*/model-layer-{layer:05d}.safetensors")
        content = path.read_bytes()
        module = f"model.language_model.layers.{layer}.mlp.experts"
        for suffix in ("weight", "weight_scale_inv"):
            for projections in (("gate", "up"), ("down",)):
                names = [f"{module}.{e}.{p}_proj.{suffix}" for e in range(12) for p in projections]
                assert b"".join(original[name][2] for name in names) in content
