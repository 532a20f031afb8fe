"""`load_stage`: one stage in memory, byte for byte, and nothing that is not proved."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import tiny_checkpoint as tiny
from reshard import build_plan, open_checkpoint, pull, split
from reshard.errors import (
    BundleError,
    DeviceError,
    LayerNotHereError,
    ReshardError,
    StorageError,
    UsageError,
    WeightsError,
)
from reshard.header import DTYPE_BITS
from reshard.runtime import StageWeights, load_stage
from tests import checkpoints
from tests.bundles import contents, digest, library, make_set, raw, rewrite
from tests.checkpoints import WEIGHTS, Blob, build, read_dir, read_file
from tests.conftest import REPOSITORY, Online, published
from tests.hub_server import HubServer
from tests.test_hub_pull import fetched, resealed, weights

LANGUAGE_MODEL = "model.language_model."
MOE = ("qwen3_5_moe", "qwen3_vl_moe", "qwen3_moe")
DENSE = ("qwen3_5", "qwen3_vl")

Sets = Callable[..., Path]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Sets of two stages, made when they are first asked for; nothing may change them."""
    made: dict[str, Path] = {}

    def get(family: str = "qwen3_5_moe", **model: Any) -> Path:
        key = json.dumps([family, model])
        if key not in made:
            root = tmp_path_factory.mktemp("set")
            made[key] = make_set(root, family, **{"layers": 4, **model})
        return made[key]

    return get


@pytest.fixture
def own(sets: Sets, tmp_path: Path) -> Path:
    """A copy of a set that a test may damage."""
    shutil.copytree(sets(), tmp_path / "out")
    return tmp_path / "out"


def stage_1(out: Path) -> Path:
    return out / "stage-01-of-02"


def load(path: Path | str, **arguments: Any) -> StageWeights:
    return load_stage(path, device="cpu", **arguments)


def refused(
    error: type[ReshardError], path: Path | str, *words: str, hint: bool = True, **arguments: Any
) -> None:
    """An error that says this and, mostly, what to do."""
    with pytest.raises(error) as caught:
        load(path, **arguments)
    assert type(caught.value) is error
    assert not hint or caught.value.hint
    for word in words:
        assert word in caught.value.message


def layer_file(layer: int) -> str:
    return f"model-layer-{layer:05d}.safetensors"


# --- the same bytes -------------------------------------------------------------------------------

VARIANTS = [
    *((family, form, False) for family in MOE for form in WEIGHTS),
    *((family, form, True) for family in MOE[:2] for form in ("bf16", "fp8")),
    *(
        (family, form, text_only)
        for family in DENSE
        for form in ("bf16", "fp8")
        for text_only in (False, True)
    ),
]


@pytest.mark.parametrize(("family", "form", "text_only"), VARIANTS)
def test_tensors_are_those_that_the_library_reads(
    sets: Sets, family: str, form: str, text_only: bool
) -> None:
    """Of every stage, mapped or read; all stages together are the checkpoint."""
    out = sets(family, weights=form, text_only=text_only)
    together: dict[str, Any] = {}
    for number in range(2):
        directory = out / f"stage-{number:02d}-of-02"
        expected = library(directory)
        for mmap in (True, False):
            stage = load(directory, mmap=mmap)
            assert contents(stage.tensors) == expected
            assert (stage.stage, stage.pp_size) == (number, 2)
            assert stage.layers == range(2 * number, 2 * number + 2)
            assert list(stage.experts) == (list(stage.layers) if family in MOE else [])
        together |= expected
    assert together == library(out.parent / "in")


@pytest.mark.parametrize("form", ["bf16", "bf16_per_expert", "mixed"])
def test_four_stages_of_any_layout(tmp_path: Path, form: str) -> None:
    """Placed by layer, whatever the experts' names are; numbers are those of the whole model."""
    out = make_set(tmp_path, stages=4, weights=form, tied=True)
    union: dict[str, Any] = {}
    for number in range(4):
        stage = load(out, stage=number)
        assert stage.layers == range(2 * number, 2 * number + 2)
        here = {int(n.split(".")[3]) for n in stage.tensors if ".language_model.layers." in n}
        assert here == set(stage.layers) == set(stage.experts)
        union |= contents(stage.tensors)
    assert union == library(tmp_path / "in")


def test_every_dtype(own: Path) -> None:
    """Those that torch has, scalars, tensors without elements, and at odd offsets."""
    prefix = f"{LANGUAGE_MODEL}layers.2."
    tensors: dict[str, Blob] = {f"{prefix}odd": ("U8", (3,), b"abc")}
    for dtype in DTYPE_BITS:
        if not dtype.startswith("F6"):
            shape = () if dtype in ("F64", "I64") else (2, 4)
            size = tiny.nbytes(dtype, shape)
            data = bytes(size) if dtype == "BOOL" else bytes(range(1, size + 1))
            tensors[f"{prefix}of_{dtype}"] = (dtype, shape, data)
            tensors[f"{prefix}empty_{dtype}"] = (dtype, (0, 4), b"")
    directory = stage_1(own)
    rewrite(directory, {layer_file(2): tensors})
    expected = library(directory)
    assert expected[f"{prefix}of_F4"][:2] == (torch.float4_e2m1fn_x2, (2, 2))
    for mmap in (True, False):
        assert contents(load(directory, mmap=mmap).tensors) == expected


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("F6_E2M3", (4,), 3), ("F6_E3M2", (4,), 3), ("F31", (4,), 4), ("F4", (2, 3), 3)],
)
def test_what_torch_cannot_hold(own: Path, dtype: str, shape: tuple[int, ...], size: int) -> None:
    name = f"{LANGUAGE_MODEL}layers.2.input_layernorm.weight"
    rewrite(stage_1(own), {layer_file(2): {name: (dtype, shape, bytes(size))}})
    for mmap in (True, False):
        refused(WeightsError, stage_1(own), name, f"dtype {dtype}", "torch cannot hold", mmap=mmap)


def test_verified_data(sets: Sets) -> None:
    expected = contents(load(stage_1(sets())).tensors)
    assert contents(load(stage_1(sets()), verify=True).tensors) == expected


# --- which stage ----------------------------------------------------------------------------------


def test_every_kind_of_directory(
    sets: Sets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage directory, the root of a set, pulled stages, one or several; as text and as a path."""
    out = sets()
    pull(out, tmp_path / "one", [1])
    pull(out, tmp_path / "both", [0, 1])
    shutil.copytree(stage_1(out), tmp_path / "elsewhere")
    expected = contents(load(stage_1(out)).tensors)
    places: list[tuple[Path | str, int | None]] = [
        (stage_1(out), None),
        (str(stage_1(out)), 1),
        (out, 1),
        (str(out), 1),
        (tmp_path / "one", None),
        (tmp_path / "both", 1),
        (tmp_path / "elsewhere", None),
    ]
    for place, stage in places:
        found = load(place, stage=stage, pp_size=2)
        assert (found.stage, found.layers) == (1, range(2, 4))
        assert contents(found.tensors) == expected
    monkeypatch.chdir(tmp_path)
    assert contents(load("one").tensors) == expected
    assert contents(load("./both", stage=1).tensors) == expected


def test_what_was_not_asked_for_is_refused(sets: Sets, tmp_path: Path) -> None:
    out = sets()
    pull(out, tmp_path / "one", [1])
    refused(UsageError, out, "has stages 0, 1; say which one")
    refused(UsageError, out, "stage 2 is not one of 2", stage=2, hint=False)
    refused(UsageError, out, "stage -1 is not one of 2", stage=-1, hint=False)
    for place in (stage_1(out), tmp_path / "one"):
        refused(BundleError, place, "stage 0 is not in", "it has 1", stage=0)
        refused(BundleError, place, "has 2 stages, 4 were asked for", pp_size=4)
    refused(BundleError, out, "has 2 stages, 4 were asked for", stage=3, pp_size=4)


def test_only_files_of_the_stage_are_opened(sets: Sets) -> None:
    """And no index, no tokenizer: the manifest, config.json and the weights."""
    out = sets()
    own = {f"stage-01-of-02/{name}" for name in weights(stage_1(out))}
    with opened_below(out) as names:
        load(out, stage=1)
    assert set(names) == {"reshard.json", "config.json", *own}
    with opened_below(stage_1(out)) as names:
        load(stage_1(out), mmap=False)
    assert set(names) == {"reshard.json", "config.json", *weights(stage_1(out))}
    assert names[0] == "reshard.json"


_watched: dict[str, list[str]] = {}


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fsdecode(arguments[0])
        for root, names in _watched.items():
            if path.startswith(f"{root}/"):
                names.append(path.removeprefix(f"{root}/"))


@contextmanager
def opened_below(root: Path) -> Iterator[list[str]]:
    """The files below `root` that are opened meanwhile."""
    if not hasattr(opened_below, "installed"):
        sys.addaudithook(_watch)  # for good: there is no way to remove it
        opened_below.installed = True  # type: ignore[attr-defined]
    _watched[str(root)] = []
    try:
        yield _watched[str(root)]
    finally:
        del _watched[str(root)]


def test_other_stages_may_be_gone(own: Path) -> None:
    shutil.rmtree(own / "stage-00-of-02")
    assert load(own, stage=1).layers == range(2, 4)
    refused(BundleError, own, "no such file", stage=0)


@pytest.mark.parametrize("shape", [(0, 2**64), (2**63, 0), (2**62, 2, 0), (0, 10**40)])
def test_empty_tensors_of_absurd_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Beside a 0, a header may say anything, and torch cannot hold that."""
    stage = make_set(tmp_path, layers=2) / "stage-01-of-02"
    name = "model.language_model.layers.1.empty"
    file = layer_file(1)
    rewrite(stage, {file: {**read_file(stage / file), name: ("BF16", shape, b"")}})
    refused(WeightsError, stage, name, "shape", "torch cannot hold")


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """Each mapping keeps a descriptor; the error names a file, and the limit to raise."""
    stage = make_set(tmp_path, layers=40, stages=1) / "stage-00-of-01"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, limits[1]))
    try:
        refused(StorageError, stage, ".safetensors: Too many open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# --- what is refused ------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("mmap", [True, False])
def test_files_that_are_not_the_manifests(own: Path, sets: Sets, mmap: bool) -> None:
    """Missing, cut off, longer, with another header, or of another set: refused before use."""
    directory = stage_1(own)
    file = directory / layer_file(3)
    whole = file.read_bytes()
    other = stage_1(sets(hidden_size=40)) / file.name
    experts = read_file(file)
    gate = next(name for name in experts if name.endswith("mlp.gate.weight"))
    sizes = {
        "truncated": whole[:-1],
        "longer": whole + b"\0",
        "empty": b"",
        "of another set": other.read_bytes(),
    }
    for data in sizes.values():
        file.write_bytes(data)
        words = (file.name, f"{len(data):,} bytes, the manifest says {len(whole):,}")
        refused(BundleError, directory, *words, mmap=mmap)
    headers = {
        "renamed": whole.replace(b"input_layernorm", b"input_layernorn", 1),
        "dtype": whole.replace(b'"BF16"', b'"F16" ', 1),
        "shape": whole.replace(b"[8,48,32]", b"[8,32,48]", 1),
        "metadata": whole.replace(b'"pt"', b'"tf"', 1),
        "space": whole.replace(b"}  ", b"} \n", 1),
    }
    for data in headers.values():
        assert data != whole and len(data) == len(whole)
        file.write_bytes(data)
        refused(
            BundleError, directory, file.name, "header is not the one in the manifest", mmap=mmap
        )
    file.unlink()
    refused(BundleError, directory, file.name, "no such file", mmap=mmap)
    file.mkdir()
    refused(BundleError, directory, file.name, "not a regular file", mmap=mmap)
    file.rmdir()
    file.write_bytes(whole)
    assert gate in load(directory, mmap=mmap).tensors


def test_headers_that_are_none(own: Path) -> None:
    """Of the right size, but not safetensors: each says what it is, and in which file."""
    file = stage_1(own) / layer_file(2)
    size = file.stat().st_size
    starts = {
        b"version https://git-lfs.github.com/spec/v1\n": "git-lfs pointer",
        b"<!DOCTYPE html>\n<html>": "web page",
        b"\0" * 8: "header length 0",
    }
    for start, word in starts.items():
        file.write_bytes(start.ljust(size, b"\0"))
        with pytest.raises(ReshardError, match=layer_file(2)) as caught:
            load(stage_1(own))
        assert word in caught.value.message


@pytest.mark.parametrize("mmap", [True, False])
def test_a_flipped_byte_is_found_by_verify_alone(own: Path, mmap: bool) -> None:
    """Also weights of another training step: same names, same sizes, same headers."""
    file = stage_1(own) / layer_file(2)
    whole = file.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    other = build(own.parent / "other", layers=4, seed=1)
    split(build_plan(open_checkpoint(other), 2), own.parent / "out2")
    for data in (flipped, (stage_1(own.parent / "out2") / file.name).read_bytes()):
        file.write_bytes(data)
        assert load(stage_1(own), mmap=mmap).layers == range(2, 4)
        refused(BundleError, stage_1(own), file.name, "sha256 is", verify=True, mmap=mmap)


def test_verify_without_checksums(sets: Sets) -> None:
    """Nothing is taken for verified that nobody vouches for."""
    out = sets(checksums=False)
    assert load(stage_1(out)).layers == range(2, 4)
    refused(BundleError, stage_1(out), "the manifest has no sha256", verify=True)


def test_no_finished_set(own: Path, sets: Sets, tmp_path: Path) -> None:
    refused(BundleError, sets().parent / "in", "is not a bundle: it has no reshard.json")
    (own / "reshard.json").unlink()
    refused(BundleError, own, "is not a bundle", stage=1)
    (own / ".reshard-partial").mkdir()
    refused(BundleError, own, "is an unfinished output", stage=1)
    refused(BundleError, tmp_path / "nowhere", "no such directory")
    refused(BundleError, stage_1(own) / "config.json", "is not a directory")


@pytest.mark.parametrize("change", ["edited", "longer", "missing"])
def test_another_config(own: Path, change: str) -> None:
    """It decides what tensors are; so it must be the manifest's."""
    config = stage_1(own) / "config.json"
    if change == "missing":
        config.unlink()
    else:
        old, new = (
            (b'"hidden_size": 32', b'"hidden_size": 48') if change == "edited" else (b"{", b"{ ")
        )
        edit(config, lambda data: data.replace(old, new, 1))
    refused(BundleError, stage_1(own), "config.json is missing or was changed")


def test_manifests_that_are_none(own: Path) -> None:
    path = stage_1(own) / "reshard.json"
    good = json.loads(path.read_bytes())

    def changed(change: Callable[[Any], object]) -> bytes:
        document = json.loads(path.read_bytes())
        change(document)
        return resealed(document)

    file = good["stages"][1]["files"][0]["name"]
    outside = changed(lambda d: d["stages"][1]["files"][0].update(name=f"../stage-00-of-02/{file}"))
    manifests = {
        b"": "reshard.json",
        b"[]": "reshard.json",
        b"[" * 100_000: "reshard.json",
        path.read_bytes()[:-20]: "reshard.json",
        json.dumps({**good, "set_id": "0" * 64}).encode(): "set_id is",
        json.dumps(
            {**good, "format_version": 2}
        ).encode(): "format version 2, this reshard reads 1",
        outside: "is not the name of a bundle's weight file",
        changed(lambda d: d["side_files"][0].update(name="../config.json")): "not an acceptable",
        changed(lambda d: d.update(present=[])): "present names no stage",
        changed(lambda d: d.update(present=[5])): "present names no stage",
        changed(lambda d: d["stages"][1].update(start_layer=1)): "do not fit together",
        changed(lambda d: d["stages"].pop(0)): "stages are not numbered in order",
        changed(lambda d: d["side_files"].clear()): "does not vouch for a config.json",
    }
    for manifest, word in manifests.items():
        path.write_bytes(manifest)
        refused(BundleError, stage_1(own), word, hint=False)


def test_a_manifest_of_another_set(own: Path, sets: Sets) -> None:
    """With its own config, but beside the files of this one."""
    other = stage_1(sets(hidden_size=40))
    for name in ("reshard.json", "config.json"):
        shutil.copy(other / name, stage_1(own) / name)
    refused(BundleError, stage_1(own), "the manifest says")


def test_files_that_do_not_hold_what_they_should(own: Path) -> None:
    """The manifest vouches for them, and they are not what reshard writes."""
    directory = stage_1(own)
    keep = {name: (directory / name).read_bytes() for name in ("reshard.json", layer_file(2))}
    tensors = read_file(directory / layer_file(2))
    first = next(iter(tensors))
    parts = [f"model-layer-00002-0000{n}-of-00002.safetensors" for n in (1, 2)]
    foreign: dict[str, Blob] = {first.replace("layers.2.", "layers.3."): tensors[first]}
    unknown: dict[str, Blob] = {"somebody.else": tensors[first]}

    def check(*words: str, **change: Any) -> None:
        rewrite(directory, **change)
        refused(BundleError, directory, *words)
        for name, data in keep.items():
            (directory / name).write_bytes(data)

    for odd in (foreign, unknown):
        words = (layer_file(2), next(iter(odd)), "does not belong there")
        check(*words, files={layer_file(2): tensors | odd})
    twice = {parts[0]: tensors, parts[1]: {first: tensors[first]}}
    check(parts[1], first, f"as {parts[0]} does", files=twice, remove=[layer_file(2)])
    lacking = f"holds {len(tensors)} tensors, not {len(tensors) + 1}"
    check(layer_file(2), lacking, files={layer_file(2): tensors}, tensors=len(tensors) + 1)


def test_a_layer_in_several_files(own: Path) -> None:
    """As one that exceeds 20 GB is; its experts may be parted anywhere."""
    out = stage_1(own)
    expected = contents(load(out).tensors)
    tensors = list(read_file(out / layer_file(2)).items())
    parts = [f"model-layer-00002-0000{n}-of-00002.safetensors" for n in (1, 2)]
    halves = {parts[0]: dict(tensors[:5]), parts[1]: dict(tensors[5:])}
    rewrite(out, halves, remove=[layer_file(2)])
    for mmap in (True, False):
        assert contents(load(out, mmap=mmap).tensors) == expected


@pytest.mark.parametrize("mmap", [True, False])
def test_a_run_of_experts_in_several_files(tmp_path: Path, mmap: bool) -> None:
    out = stage_1(make_set(tmp_path, layers=4, weights="bf16_per_expert"))
    before = load(out, mmap=False)
    tensors = read_file(out / layer_file(2))
    low = {n: t for n, t in tensors.items() if ".experts.3." in n or ".experts.4." in n}
    parts = [f"model-layer-00002-0000{n}-of-00002.safetensors" for n in (1, 2)]
    rest = {n: t for n, t in tensors.items() if n not in low}
    rewrite(out, {parts[0]: low, parts[1]: rest}, remove=[layer_file(2)])
    after = load(out, mmap=mmap)
    assert contents(after.tensors) == contents(before.tensors)
    assert torch.equal(after.experts[2].w13, before.experts[2].w13)
    assert torch.equal(after.experts[2].w2, before.experts[2].w2)


# --- layers and experts ---------------------------------------------------------------------------


def test_layers_have_the_numbers_of_the_whole_model(sets: Sets) -> None:
    stage = load(sets(), stage=1)
    assert stage.layers == range(2, 4)
    assert (list(stage.experts), len(stage.experts)) == ([2, 3], 2)
    assert 2 in stage.experts and 0 not in stage.experts
    for ask in (stage.layer, stage.experts.__getitem__):
        with pytest.raises(KeyError) as caught:
            ask(1)
        assert isinstance(caught.value, LayerNotHereError)
        assert str(caught.value) == "layer 1 belongs to stage 0 of 2; stage 1 has layers 2-3"
        for nowhere in (4, -1):
            with pytest.raises(
                LayerNotHereError, match=f"there is no layer {nowhere}: the model has 4"
            ):
                ask(nowhere)
    assert stage.experts.get(0) is None


def test_tensors_of_a_layer(sets: Sets) -> None:
    for text_only, prefix in ((False, LANGUAGE_MODEL), (True, "model.")):
        stage = load(sets(text_only=text_only), stage=1)
        layer = stage.layer(3)
        assert {f"{prefix}layers.3.{name}" for name in layer} == {
            name for name in stage.tensors if name.startswith(f"{prefix}layers.3.")
        }
        assert layer["mlp.gate.weight"] is stage.tensors[f"{prefix}layers.3.mlp.gate.weight"]


@pytest.mark.parametrize("family", DENSE)
def test_dense_families_have_no_experts(sets: Sets, family: str) -> None:
    stage = load(sets(family), stage=1)
    assert (len(stage.experts), 2 in stage.experts) == (0, False)
    with pytest.raises(LayerNotHereError, match="^layer 2 has no routed experts: it is dense"):
        stage.experts[2]
    with pytest.raises(LayerNotHereError, match="^layer 0 belongs to stage 0 of 2"):
        stage.experts[0]
    assert "mlp.gate_proj.weight" in stage.layer(2)


def test_dense_layers_among_sparse_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlp_only_layers` of Qwen3-VL: `experts` has the other ones."""
    sparse = checkpoints._mlp

    def mixed(model: checkpoints.Model) -> tiny.Part:
        mlp = sparse(model)
        return lambda prefix, d: (checkpoints.dense_mlp if ".layers.2." in prefix else mlp)(
            prefix, d
        )

    monkeypatch.setattr(checkpoints, "_mlp", mixed)
    stage = load(make_set(tmp_path, "qwen3_vl_moe", layers=4), stage=1)
    assert list(stage.experts) == [3]
    assert stage.experts[3].w13.shape == (8, 48, 32)
    with pytest.raises(LayerNotHereError, match="^layer 2 has no routed experts: it is dense"):
        stage.experts[2]
    assert stage.layer(2)["mlp.up_proj.weight"].shape == (24, 32)


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("form", ["bf16", "bf16_per_expert", "fp8"])
@pytest.mark.parametrize("mmap", [True, False])
def test_experts_are_views(sets: Sets, family: str, form: str, mmap: bool) -> None:
    """Expert e of w13 is gate over up, w2 is down; no byte of them is stored twice."""
    stage = load(sets(family, weights=form), stage=1, mmap=mmap)
    assert set(stage.experts) == {2, 3}
    for layer, experts in stage.experts.items():
        assert (experts.first_expert, experts.num_experts) == (0, 8)
        assert (experts.hidden_size, experts.intermediate_size) == (32, 24)
        assert experts.w13.shape == (8, 48, 32) and experts.w2.shape == (8, 32, 24)
        tensors = stage.layer(layer)
        where = {t.untyped_storage().data_ptr() for t in tensors.values()}
        assert experts.w13.untyped_storage().data_ptr() in where
        assert experts.w2.untyped_storage().data_ptr() in where
        if "mlp.experts.gate_up_proj" in tensors:
            gate_up, down = (tensors[f"mlp.experts.{p}_proj"] for p in ("gate_up", "down"))
            transposed = family == "qwen3_vl_moe"
            assert experts.w13.data_ptr() == gate_up.data_ptr()
            assert experts.w2.data_ptr() == down.data_ptr()
            assert experts.w13.stride() == ((1536, 1, 48) if transposed else (1536, 32, 1))
            assert experts.w2.stride() == ((768, 1, 32) if transposed else (768, 24, 1))
            assert raw(experts.w13.mT if transposed else experts.w13) == raw(gate_up)
            assert raw(experts.w2.mT if transposed else experts.w2) == raw(down)
            continue
        for expert in range(8):
            gate, up, down = (
                tensors[f"mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up", "down")
            )
            assert experts.w13[expert].data_ptr() == gate.data_ptr()
            assert raw(experts.w13[expert]) == raw(gate) + raw(up)
            assert experts.w2[expert].data_ptr() == down.data_ptr()
            assert raw(experts.w2[expert]) == raw(down)
        assert (experts.block, experts.w13_scale is None) == (
            ((16, 16), False) if form == "fp8" else (None, True)
        )


@pytest.mark.parametrize("family", MOE)
def test_scales_of_gate_and_up_are_apart(sets: Sets, family: str) -> None:
    """24 rows have two rows of scales, in blocks of 16: 48 rows in one would have three."""
    stage = load(sets(family, weights="fp8"), stage=1)
    experts, tensors = stage.experts[3], stage.layer(3)
    assert experts.w13_scale is not None and experts.w2_scale is not None
    assert experts.w13_scale.shape == (8, 2, 2, 2) and experts.w2_scale.shape == (8, 2, 2)
    for expert in range(8):
        names = [f"mlp.experts.{expert}.{p}_proj.weight_scale_inv" for p in ("gate", "up", "down")]
        gate, up, down = (tensors[name] for name in names)
        assert experts.w13_scale[expert].data_ptr() == gate.data_ptr()
        assert torch.equal(experts.w13_scale[expert, 0], gate)
        assert torch.equal(experts.w13_scale[expert, 1], up)
        assert torch.equal(experts.w2_scale[expert], down)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("gptq", ("qweight I32", "(gptq)")),
        ("autoround", ("qweight I32", "(auto-round)")),
        ("awq", ("weight_packed I32", "(compressed-tensors)")),
        ("nvfp4", ("weight U8", "weight_scale_2 F32", "(modelopt)")),
        ("nvfp4_fused", ("(no suffix) U8", "_scale_2 F32", "(modelopt)")),
        ("mxfp4", ("weight U8", "weight_scale U8", "(quark)")),
    ],
)
def test_other_formats_load_and_experts_say_which(
    sets: Sets, family: str, form: str, words: tuple[str, ...]
) -> None:
    stage = load(sets(family, weights=form), stage=1)
    assert list(stage.experts) == [2, 3]
    with pytest.raises(WeightsError, match=r"layers\.3\.mlp\.experts.* the forward runs") as caught:
        stage.experts[3]
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_mapped_tensors_are_the_file(sets: Sets, form: str) -> None:
    """All of a file are views of one mapping, each at its own offset; nothing is copied."""
    directory = stage_1(sets(weights=form))
    stage = load(directory)
    for path in directory.glob("*.safetensors"):
        length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8:length])
        tensors = {n: stage.tensors[n] for n in header if n != "__metadata__"}
        bases = {t.untyped_storage().data_ptr() for t in tensors.values()}
        assert len(bases) == 1 and min(bases) % 4096 == 0
        for name, tensor in tensors.items():
            assert tensor.untyped_storage().nbytes() == path.stat().st_size
            begin = length + header[name]["data_offsets"][0]
            assert tensor.data_ptr() == min(bases) + begin


def test_read_tensors_lie_in_one_buffer_for_each_file(sets: Sets) -> None:
    directory = stage_1(sets(weights="fp8"))
    stage = load(directory, mmap=False)
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in stage.tensors.values()}
    assert len(buffers) == len(weights(directory))
    held = sum(tensor.nbytes for tensor in stage.tensors.values())
    assert sum(storage.nbytes() for storage in buffers.values()) < held + 256 * len(stage.tensors)


@pytest.mark.parametrize("mmap", [True, False])
def test_the_file_is_never_written(own: Path, mmap: bool) -> None:
    before = read_dir(stage_1(own))
    stage = load(stage_1(own), mmap=mmap)
    for tensor in stage.tensors.values():
        tensor.zero_()
    assert not any(raw(tensor).strip(b"\0") for tensor in stage.tensors.values())
    assert not stage.experts[2].w13.any()
    assert read_dir(stage_1(own)) == before
    assert contents(load(stage_1(own)).tensors) == library(stage_1(own))


def test_read_only_files_can_be_loaded(own: Path) -> None:
    for path in stage_1(own).iterdir():
        path.chmod(0o444)
    assert contents(load(stage_1(own)).tensors) == library(stage_1(own))


# --- ranks ----------------------------------------------------------------------------------------

JOINED = {"w13": 2, "w13_scale": 3, "w2": 3, "w2_scale": 3}
"""The axis along which parts of these lie, after gate and up were put on one of their own."""

RANKED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "experts": 6}


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("form", ["bf16", "bf16_per_expert", "fp8"])
@pytest.mark.parametrize("mmap", [True, False])
def test_ranks_together_are_the_whole(sets: Sets, family: str, form: str, mmap: bool) -> None:
    """Experts by range; rows of gate and of up, columns of down; and so the shared expert."""
    out = sets(family, weights=form, **RANKED)
    whole = load(out, stage=1, mmap=mmap)
    full = whole.experts[2]
    for ep_size in (1, 4):
        for ep in range(ep_size):
            tp = [
                load(out, stage=1, ep=(ep, ep_size), tp=(rank, 2), mmap=mmap) for rank in range(2)
            ]
            for stage in tp:
                assert (stage.ep, stage.tp[1]) == ((ep, ep_size), 2)
            first, end = 6 * ep // ep_size, 6 * (ep + 1) // ep_size
            parts = [stage.experts[2] for stage in tp]
            assert {(p.first_expert, p.num_experts) for p in parts} == {(first, 6)}
            assert {p.intermediate_size for p in parts} == {16}
            for name, halves in (("w13", 2), ("w13_scale", 2), ("w2", 1), ("w2_scale", 1)):
                right = getattr(full, name)
                if right is None:
                    continue
                found = [torch.stack(getattr(p, name).chunk(halves, 1)) for p in parts]
                together = torch.cat([t.float() for t in found], JOINED[name])
                right = torch.stack(right[first:end].chunk(halves, 1)).float()
                assert torch.equal(together, right), (name, ep)
            if family == "qwen3_5_moe":
                layers = [stage.layer(2) for stage in tp]
                for proj, axis in (("gate", 0), ("up", 0), ("down", 1)):
                    name = f"mlp.shared_expert.{proj}_proj.weight"
                    joined = torch.cat([layer[name].float() for layer in layers], axis)
                    assert torch.equal(joined, whole.layer(2)[name].float())


@pytest.mark.parametrize("form", ["bf16", "bf16_per_expert"])
def test_a_rank_has_no_tensors_of_other_experts(sets: Sets, form: str) -> None:
    """All else is whole, the multi-token prediction's experts apart."""
    out = sets(weights=form)
    whole, rank = load(out, stage=1), load(out, stage=1, ep=(2, 3))
    here = range(5, 8)
    for name, tensor in whole.tensors.items():
        if ".mlp.experts." not in name:
            assert torch.equal(rank.tensors[name], tensor)
        elif name.endswith(("gate_up_proj", "down_proj")):
            assert torch.equal(rank.tensors[name], tensor[5:])
        else:
            expert = int(name.partition(".experts.")[2].partition(".")[0])
            assert (name in rank.tensors) == (expert in here)
            assert expert not in here or torch.equal(rank.tensors[name], tensor)
    assert any(name.startswith("mtp.") and ".experts.5." in name for name in rank.tensors)


def test_ranks_that_cannot_be(sets: Sets) -> None:
    out = stage_1(sets())
    for bad in ((1, 1), (-1, 2), (2, 2), (0, 0)):
        for name in ("ep", "tp"):
            arguments: dict[str, Any] = {name: bad}
            refused(UsageError, out, f"{name} is {bad}", **arguments)
    refused(UsageError, out, "8 experts cannot be divided among 9 ranks", hint=False, ep=(0, 9))
    refused(UsageError, out, "24 rows or columns cannot be divided among 5 ranks", tp=(0, 5))
    fp8 = stage_1(sets(weights="fp8"))
    refused(UsageError, fp8, "cannot be divided among 2 ranks in multiples of 16", tp=(0, 2))
    refused(WeightsError, stage_1(sets(weights="gptq")), "qweight I32", tp=(0, 2))


def test_progress_is_told_of_every_byte(sets: Sets) -> None:
    @dataclass
    class Told:
        phases: list[list[Any]]

        def start(self, label: str, total_bytes: int) -> None:
            self.phases.append([label, total_bytes, 0])

        def advance(self, nbytes: int) -> None:
            self.phases[-1][2] += nbytes

        def finish_file(self, path: str, how: str) -> None: ...

    told = Told([])
    stage = load(stage_1(sets()), mmap=False, verify=True, jobs=1, progress=told)
    held = sum(tensor.nbytes for tensor in stage.tensors.values())
    files = sum(map(len, weights(stage_1(sets())).values()))
    assert told.phases == [["verify", files, files], ["load", held, held]]


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_no_cuda_device(sets: Sets) -> None:
    out = stage_1(sets())
    assert load_stage(out).device == torch.device("cpu")
    for device in ("cuda", "cuda:3", torch.device("cuda", 1)):
        with pytest.raises(DeviceError, match="sees no CUDA device") as caught:
            load_stage(out, device=device)
        assert caught.value.hint


@pytest.mark.parametrize("device", ["mps", "meta", "nonsense", ""])
def test_no_such_kind_of_device(sets: Sets, device: str) -> None:
    with pytest.raises(UsageError, match="is neither cpu nor cuda"):
        load_stage(stage_1(sets()), device=device)


# --- the Hub --------------------------------------------------------------------------------------

_LOAD = """
import json, sys
from reshard.errors import ReshardError
from reshard.runtime import load_stage
from tests.bundles import digest

try:
    stage = load_stage(sys.argv[1], device="cpu", **json.loads(sys.argv[2]))
except ReshardError as error:
    print(json.dumps([type(error).__name__, error.message]))
else:
    print(json.dumps([digest(stage.tensors), [*stage.layers]]))
"""


def start(online: Online, reference: object, **arguments: Any) -> subprocess.Popen[str]:
    """`load_stage` in a process of its own, which speaks to the Hub of the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(reference), json.dumps(arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **online.hub.environment(online.home)},
    )
    online.running.append(process)
    return process


def finished(*processes: subprocess.Popen[str]) -> list[Any]:
    """What each has loaded (digest of all tensors, layers), or its error and message."""
    ends = [process.communicate(timeout=120) for process in processes]
    assert all(out for out, _ in ends), ends
    return [json.loads(out) for out, _ in ends]


def test_a_damaged_cache_says_what_to_remove(hub: HubServer, online: Online, sets: Sets) -> None:
    """Whatever is there is not loaded; a lock that is something else is not touched."""
    commit = hub.create("org/set", published(sets()))
    cache = online.home / "assets" / "reshard" / "org--set" / commit
    (cache / "stage-01-of-02").mkdir(parents=True)
    (cache / "stage-01-of-02" / "reshard.json").write_text("{}")
    ((name, message),) = finished(start(online, "org/set", stage=1))
    assert name == "BundleError" and "reshard.json" in message
    shutil.rmtree(cache / "stage-01-of-02")
    (online.home / "precious").write_text("precious")
    (cache / "stage-01-of-02.lock").symlink_to(online.home / "precious")
    ((name, message),) = finished(start(online, "org/set", stage=1))
    assert name == "OutputError" and "not a plain file" in message
    assert (online.home / "precious").read_text() == "precious"


def test_a_cache_that_cannot_be(hub: HubServer, online: Online, sets: Sets) -> None:
    hub.create("org/set", published(sets()))
    online.home.mkdir(exist_ok=True)
    (online.home / "assets").write_text("a file")
    ((name, message),) = finished(start(online, "org/set", stage=1))
    assert name == "StorageError" and "assets" in message


def test_a_stage_on_the_hub(hub: HubServer, online: Online, sets: Sets) -> None:
    """Two processes at a time: the stage is fetched once, and no other. Later, nothing is."""
    commit = hub.create("org/set", published(sets()))
    expected = [digest(load(stage_1(sets())).tensors), [2, 3]]
    both = finished(
        start(online, "org/set", stage=1, pp_size=2),
        start(online, f"hf://org/set@{commit}", stage=1),
    )
    assert both == [expected, expected]
    # The embedding, which multi-token prediction needs, is one file of both stages.
    names = sorted(path.partition("/")[2] for path in fetched(hub))
    assert names == list(weights(stage_1(sets())))

    hub.forget()
    again, other_size, many = finished(
        start(online, "org/set", stage=1),
        start(online, "org/set", stage=1, pp_size=4),
        start(online, "org/set"),
    )
    assert again == expected
    assert other_size[0] == "BundleError" and "has 2 stages, 4 were asked for" in other_size[1]
    assert many[0] == "UsageError" and "has stages 0, 1; say which one" in many[1]
    assert not fetched(hub)


def test_a_damaged_file_on_the_hub(hub: HubServer, online: Online, sets: Sets) -> None:
    """It is not loaded, and fetched again the next time."""
    hub.create("org/set", published(sets()))
    hub.fail("GET", "/blobs/.*layer-00003", corrupt=True)
    ((_, message),) = finished(start(online, "org/set", stage=1))
    assert "sha256" in message and layer_file(3) in message
    hub.forget()
    (whole,) = finished(start(online, "org/set", stage=1))
    assert whole == [digest(load(stage_1(sets())).tensors), [2, 3]]
    assert f"stage-01-of-02/{layer_file(3)}" in fetched(hub)
