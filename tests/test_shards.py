"""Which files make up a checkpoint: the index, what lies beside it, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard import Checkpoint, build_plan, open_checkpoint, split
from reshard.errors import CheckpointError, HeaderError, PlanError, UnknownTensorError, UsageError
from tests.checkpoints import Blob, build, read_dir, read_file, write_tensors

P = "model.language_model."
INDEX = "model.safetensors.index.json"


def opened(checkpoint: Checkpoint) -> dict[str, Blob]:
    """Every tensor of an open checkpoint, read where it says."""
    root = Path(checkpoint.source.root)  # type: ignore[attr-defined]
    tensors = {}
    for group in checkpoint.components.values():
        for t in group:
            with open(root / t.file, "rb") as file:
                file.seek(t.begin)
                tensors[t.name] = (t.dtype, t.shape, file.read(t.nbytes))
    return tensors


def read_index(path: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((path / INDEX).read_bytes())
    return index


def edit_index(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = read_index(path)
    edit(index)
    (path / INDEX).write_text(json.dumps(index))


def shards(path: Path) -> list[str]:
    return sorted(set(read_index(path)["weight_map"].values()))


def blob(fill: int = 1) -> Blob:
    return ("U8", (4,), bytes([fill]) * 4)


def said(checkpoint: Checkpoint, *words: str) -> bool:
    """Is there a warning or note with all these words?"""
    messages = [*checkpoint.warnings, *checkpoint.notes]
    return any(all(word in message for word in words) for message in messages)


# --- the index is followed ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_an_ordinary_checkpoint(tmp_path: Path, family: str) -> None:
    path = build(tmp_path, family)
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == read_dir(path)
    assert checkpoint.warnings == checkpoint.notes == ()
    assert checkpoint.gaps == ()
    assert [header.file for header in checkpoint.headers] == shards(path)


def test_one_file_without_an_index(tmp_path: Path) -> None:
    path = build(tmp_path, shards=1, index=False)
    assert not (path / INDEX).exists()
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == read_dir(path)
    assert checkpoint.warnings == ()


def test_several_files_without_an_index(tmp_path: Path) -> None:
    path = build(tmp_path, index=False)
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == read_dir(path)
    assert said(checkpoint, f"there is no {INDEX}", "all 4 files were read")


def test_the_output_does_not_depend_on_the_shards(tmp_path: Path) -> None:
    manifests = []
    for number, options in enumerate(({"shards": 1}, {"shards": 5}, {"index": False})):
        path = build(tmp_path / f"source-{number}", **options)  # type: ignore[arg-type]
        out = tmp_path / f"out-{number}"
        split(build_plan(open_checkpoint(path), 2), out)
        manifests.append(json.loads((out / "reshard.json").read_bytes())["stages"])
    assert manifests[0] == manifests[1] == manifests[2]


def test_a_checkpoint_named_in_another_way(tmp_path: Path) -> None:
    """`model-*.safetensors` is no rule: any name that the index gives will do."""
    path = build(tmp_path)
    for number, file in enumerate(shards(path)):
        (path / file).rename(path / f"{number:05d}.safetensors")
    renamed = {file: f"{n:05d}.safetensors" for n, file in enumerate(shards(path))}

    def edit(index: dict[str, Any]) -> None:
        index["weight_map"] = {n: renamed[f] for n, f in index["weight_map"].items()}

    edit_index(path, edit)
    assert opened(open_checkpoint(path)) == read_dir(path)


def test_a_cache_snapshot_of_links(tmp_path: Path) -> None:
    blobs = build(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert opened(open_checkpoint(snapshot)) == read_dir(blobs)


def test_another_index_is_not_followed(tmp_path: Path) -> None:
    path = build(tmp_path)
    before = opened(open_checkpoint(path))
    other = {"weight_map": {"lm_head.weight": "gone.safetensors"}}
    (path / "other.safetensors.index.json").write_text(json.dumps(other))
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == before
    assert "other.safetensors.index.json" not in checkpoint.side_files


# --- missing files --------------------------------------------------------------------------------


def test_missing_shards_are_all_listed(tmp_path: Path) -> None:
    path = build(tmp_path)
    gone = shards(path)[1:3]
    for file in gone:
        (path / file).unlink()
    with pytest.raises(CheckpointError, match="2 weight files of the checkpoint are missing") as no:
        open_checkpoint(path)
    assert all(file in no.value.message for file in gone)
    assert no.value.hint is not None and "rebuild the index" in no.value.hint


def test_renamed_shards_are_not_searched_for(tmp_path: Path) -> None:
    path = build(tmp_path)
    for file in shards(path):
        (path / file).rename(path / f"renamed-{file}")
    with pytest.raises(CheckpointError, match="4 weight files of the checkpoint are missing"):
        open_checkpoint(path)


def test_a_series_must_be_whole_even_without_an_index(tmp_path: Path) -> None:
    path = build(tmp_path, index=False)
    (path / "model.safetensors-00003-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)1 weight files.*00003-of-00004"):
        open_checkpoint(path)


def test_many_missing_files_are_counted(tmp_path: Path) -> None:
    path = build(tmp_path, shards=1)

    def edit(index: dict[str, Any]) -> None:
        index["weight_map"] |= {f"x{n}": f"gone-{n}.safetensors" for n in range(25)}

    edit_index(path, edit)
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(path)
    assert "25 weight files" in refusal.value.message
    assert refusal.value.message.count("gone-") == 10
    assert "and 15 more" in refusal.value.message


def test_a_broken_link_is_called_one(tmp_path: Path) -> None:
    path = build(tmp_path)
    file = shards(path)[2]
    (path / file).unlink()
    (path / file).symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=f"{file} is a broken link"):
        open_checkpoint(path)


def test_a_directory_in_place_of_a_shard(tmp_path: Path) -> None:
    path = build(tmp_path)
    file = shards(path)[0]
    (path / file).unlink()
    (path / file).mkdir()
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(path)
    assert file in refusal.value.message


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.gguf", None])
def test_no_safetensors_at_all(tmp_path: Path, file: str | None) -> None:
    path = build(tmp_path, index=False)
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    if file is not None:
        (path / file).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="there are no safetensors files here") as refusal:
        open_checkpoint(path)
    assert file is None or file in refusal.value.message


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_checkpoint(tmp_path / "file")


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    path = build(tmp_path, shards=1, index=False)
    write_tensors(path / "model.safetensors", {})
    with pytest.raises(CheckpointError, match="holds no tensors"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (f"{P}layers.3.", "no tensors of layers 3, of 8"),
        (f"{P}embed_tokens.", "no model.language_model.embed_tokens"),
        (f"{P}norm.", "final norm"),
        ("lm_head.", "no lm_head"),
    ],
)
def test_a_checkpoint_that_lacks_a_part_cannot_be_planned(
    tmp_path: Path, pattern: str, words: str
) -> None:
    path = build(tmp_path, shards=1, index=False)
    tensors = read_dir(path)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(pattern)}
    assert len(kept) < len(tensors)
    write_tensors(path / "model.safetensors", kept)
    checkpoint = open_checkpoint(path)
    assert len(checkpoint.gaps) == 1 and words in checkpoint.gaps[0]
    with pytest.raises(PlanError, match="the checkpoint is incomplete"):
        build_plan(checkpoint, 2)


# --- index and files disagree ---------------------------------------------------------------------


def test_a_tensor_that_its_file_lacks(tmp_path: Path) -> None:
    path = build(tmp_path)
    file = shards(path)[0]
    name = f"{P}layers.0.extra.weight"
    edit_index(path, lambda index: index["weight_map"].update({name: file}))
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(path)
    assert name in refusal.value.message and file in refusal.value.message


def test_a_known_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    path = build(tmp_path)
    name = f"{P}layers.4.mlp.gate.weight"
    edit_index(path, lambda index: index["weight_map"].pop(name))
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == read_dir(path)
    assert said(checkpoint, "1 tensors that the index does not list are included", name)


def test_a_foreign_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    path = build(tmp_path)
    file = shards(path)[0]
    before = read_dir(path)
    write_tensors(path / file, {**read_file(path / file), "rotary.inv_freq": blob()})
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == before
    assert [t.name for t in checkpoint.left_out] == ["rotary.inv_freq"]
    assert said(checkpoint, "1 unknown tensors", "left out", "rotary.inv_freq", file)
    (excluded,) = build_plan(checkpoint, 2).excluded
    assert (excluded.kind, excluded.name, excluded.bytes) == ("tensor", "rotary.inv_freq", 4)


def test_a_foreign_tensor_that_the_index_lists_is_an_error(tmp_path: Path) -> None:
    path = build(tmp_path)
    file = shards(path)[0]
    write_tensors(path / file, {**read_file(path / file), "rotary.inv_freq": blob()})
    edit_index(path, lambda index: index["weight_map"].update({"rotary.inv_freq": file}))
    with pytest.raises(UnknownTensorError, match="1 tensors belong to no part of qwen3_5_moe"):
        open_checkpoint(path)


def test_unknown_tensors_are_listed_up_to_ten(tmp_path: Path) -> None:
    path = build(tmp_path, shards=1, index=False)
    foreign = {f"draft.layers.{n}.weight": blob() for n in range(23)}
    write_tensors(path / "model.safetensors", {**read_dir(path), **foreign})
    with pytest.raises(UnknownTensorError) as refusal:
        open_checkpoint(path)
    message = refusal.value.message
    assert "23 tensors belong to no part" in message and "and 13 more" in message
    listed = [line.strip() for line in message.splitlines() if "draft" in line]
    assert listed == [f"draft.layers.{n}.weight" for n in range(10)]
    assert refusal.value.hint is not None and "model.visual.*" in refusal.value.hint


@pytest.mark.parametrize(
    "name", ["", "a\0b", f"{P}layers.01.x", f"{P}layers.{'9' * 5000}.x", "a" * 1_000_000, "\x1b[2J"]
)
def test_hostile_names_are_unknown_and_shown_safely(tmp_path: Path, name: str) -> None:
    path = build(tmp_path, shards=1, index=False)
    write_tensors(path / "model.safetensors", {**read_dir(path), name: blob()})
    with pytest.raises(UnknownTensorError) as refusal:
        open_checkpoint(path)
    assert len(refusal.value.message) < 1000
    assert refusal.value.message.replace("\n", "").isprintable()


def test_a_tensor_in_two_files_is_read_where_the_index_says(tmp_path: Path) -> None:
    path = build(tmp_path)
    before = read_dir(path)
    name = f"{P}norm.weight"
    right = read_index(path)["weight_map"][name]
    dtype, shape, data = before[name]
    for wrong in shards(path):
        if wrong != right:
            other = (dtype, shape, bytes(len(data)))
            write_tensors(path / wrong, {name: other, **read_file(path / wrong)})
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == before
    assert sum("1 tensors are left alone" in warning for warning in checkpoint.warnings) == 3


def test_a_tensor_in_two_files_without_an_index_is_an_error(tmp_path: Path) -> None:
    path = build(tmp_path, index=False)
    first, *_, last = sorted(path.glob("*.safetensors"))
    name = next(iter(read_file(first)))
    write_tensors(last, {**read_file(last), name: read_file(first)[name]})
    with pytest.raises(CheckpointError, match="is in two files") as refusal:
        open_checkpoint(path)
    assert all(word in refusal.value.message for word in (name, first.name, last.name))


def test_an_unlisted_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    path = build(tmp_path)
    name = f"{P}layers.4.extra.weight"
    for file in shards(path)[:2]:
        write_tensors(path / file, {**read_file(path / file), name: blob()})
    with pytest.raises(CheckpointError, match="is in two files"):
        open_checkpoint(path)


def test_two_names_of_one_file_are_an_error(tmp_path: Path) -> None:
    """As on a file system that folds case."""
    path = build(tmp_path)
    file = shards(path)[0]
    other = file.replace("model", "Model", 1)
    (path / other).hardlink_to(path / file)
    name = next(iter(read_file(path / file)))
    edit_index(path, lambda index: index["weight_map"].update({name: other}))
    with pytest.raises(CheckpointError, match="which are the same file here") as refusal:
        open_checkpoint(path)
    assert file in refusal.value.message and other in refusal.value.message


# --- total_size -----------------------------------------------------------------------------------


def total(path: Path) -> int:
    return sum(len(data) for _, _, data in read_dir(path).values())


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (lambda size: size + 1, "the index gives total_size"),
        (lambda size: -1, "total_size -1"),
        (lambda size: str(size), "total_size '"),
        (lambda size: [size], "total_size ["),
        (lambda size: None, "the index gives no total_size"),
    ],
)
def test_an_odd_total_size_is_only_mentioned(
    tmp_path: Path, written: Callable[[int], Any], words: str
) -> None:
    path = build(tmp_path / "source", total_size=written)
    checkpoint = open_checkpoint(path)
    assert said(checkpoint, words, f"the tensors take {total(path):,} bytes")
    split(build_plan(checkpoint, 1), tmp_path / "out")
    recounted = read_index(tmp_path / "out")["metadata"]["total_size"]
    assert type(recounted) is int and recounted == total(path)


def test_a_float_that_is_right_is_not_mentioned(tmp_path: Path) -> None:
    path = build(tmp_path, total_size=float)
    assert ".0" in (path / INDEX).read_text()
    assert open_checkpoint(path).warnings == ()


def test_an_index_without_metadata(tmp_path: Path) -> None:
    path = build(tmp_path)
    edit_index(path, lambda index: index.pop("metadata"))
    checkpoint = open_checkpoint(path)
    assert checkpoint.warnings == () and said(checkpoint, "the index gives no total_size")


# --- index files that are refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "stage-00-of-02/model-head.safetensors",
        "./model.safetensors",
        "..",
        "",
        ".safetensors/..",
        "model\\x.safetensors",
        "..\\model.safetensors",
        "mo\0del.safetensors",
        "model.bin",
        "model.safetensors.index.json",
        "model.SAFETENSORS",
        "config.json",
        "a" * 300 + ".safetensors",
    ],
)
def test_hostile_file_names_in_the_index(tmp_path: Path, name: str) -> None:
    path = build(tmp_path / "source", shards=1)
    shutil.copy(path / "model.safetensors", tmp_path / "model.safetensors")
    (path / "sub").mkdir()
    shutil.copy(path / "model.safetensors", path / "sub")
    edit_index(path, lambda index: index["weight_map"].update({"lm_head.weight": name}))
    with pytest.raises(CheckpointError, match="is not an acceptable file name") as refusal:
        open_checkpoint(path)
    assert refusal.value.message.startswith(INDEX)
    assert refusal.value.message.isprintable() and len(refusal.value.message) < 400


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "weight_map must map names to file names"),
        ('{"weight_map": []}', "weight_map must map names to file names"),
        ('{"weight_map": null}', "weight_map must map names to file names"),
        ('{"weight_map": {"a": 1}}', "weight_map must map names to file names"),
        ('{"weight_map": {"a": null}}', "weight_map must map names to file names"),
        ('{"weight_map": {"a": ["model.safetensors"]}}', "must map names to file names"),
        ("[]", "must be an object"),
        ("", "is not valid JSON"),
        ('{"weight_map": {\n', r"is not valid JSON.*line 2, column 1"),
        ('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "duplicate key a"),
        ('{"weight_map": {}, "weight_map": {}}', "duplicate key weight_map"),
        ('{"metadata": {"total_size": 1, "total_size": 1}, "weight_map": {}}', "duplicate key"),
        ('{"weight_map": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_index(tmp_path: Path, content: str, words: str) -> None:
    path = build(tmp_path)
    (path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=words) as refusal:
        open_checkpoint(path)
    assert INDEX in refusal.value.message


def test_an_index_that_is_not_utf_8(tmp_path: Path) -> None:
    path = build(tmp_path)
    (path / INDEX).write_bytes(b'{"weight_map": {"\xff": "model.safetensors"}}')
    with pytest.raises(CheckpointError, match=f"{INDEX} is not valid UTF-8"):
        open_checkpoint(path)


# --- broken and foreign shards --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs pointer"),
        (b"", "file is empty"),
        (b"<!DOCTYPE html><html></html>", "web page"),
    ],
)
def test_a_shard_that_is_something_else(tmp_path: Path, content: bytes, words: str) -> None:
    path = build(tmp_path)
    file = shards(path)[1]
    (path / file).write_bytes(content)
    with pytest.raises(HeaderError, match=words) as refusal:
        open_checkpoint(path)
    assert file in refusal.value.message


@pytest.mark.parametrize("form", ["mlx", "flax", "tf"])
def test_weights_of_another_framework_are_refused(tmp_path: Path, form: str) -> None:
    path = build(tmp_path, metadata={"format": form})
    with pytest.raises(CheckpointError, match=f"its metadata says format {form}"):
        open_checkpoint(path)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "step": "7"}, {"note": "x"}])
def test_other_metadata_is_read(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = build(tmp_path, metadata=metadata)
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == read_dir(path)
    assert checkpoint.warnings == ()


def test_a_dtype_of_the_future_is_mentioned_and_copied(tmp_path: Path) -> None:
    path = build(tmp_path / "source", shards=1, index=False)
    name = f"{P}layers.0.new.weight"
    data = bytes(range(5))
    write_tensors(path / "model.safetensors", {**read_dir(path), name: ("I4", (10,), data)})
    checkpoint = open_checkpoint(path)
    assert said(checkpoint, "dtype I4", name)
    assert opened(checkpoint)[name] == ("I4", (10,), data)


# --- weights beside the index ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "tensors"),
    [
        ("adapter_model.safetensors", ("base_model.model.model.layers.0.q_proj.lora_A.weight",)),
        ("consolidated.safetensors", ("tok_embeddings.weight", "layers.0.attention.wq.weight")),
        ("draft.safetensors", ("eagle.layers.0.weight",)),
        ("empty.safetensors", ()),
    ],
)
def test_foreign_weights_beside_the_index_are_only_noted(
    tmp_path: Path, file: str, tensors: tuple[str, ...]
) -> None:
    path = build(tmp_path)
    before = opened(open_checkpoint(path))
    write_tensors(path / file, dict.fromkeys(tensors, blob()))
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == before
    assert said(checkpoint, file, "is not read")
    assert checkpoint.warnings == ()
    assert file not in checkpoint.side_files
    assert file not in [header.file for header in checkpoint.headers]


def test_repeated_weights_beside_the_index_are_only_noted(tmp_path: Path) -> None:
    path = build(tmp_path)
    before = opened(open_checkpoint(path))
    other = {name: (d, s, bytes(len(data))) for name, (d, s, data) in before.items()}
    write_tensors(path / "model.safetensors", other)
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == before
    assert said(checkpoint, "model.safetensors", "repeats tensors of other files")


def test_weights_in_sub_directories_are_not_read(tmp_path: Path) -> None:
    path = build(tmp_path)
    before = opened(open_checkpoint(path))
    (path / "original").mkdir()
    write_tensors(path / "original" / "x.safetensors", {f"{P}layers.0.extra.weight": blob()})
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == before
    assert said(checkpoint, "sub-directories are not carried along", "original")


def test_new_weights_beside_the_index_are_included(tmp_path: Path) -> None:
    """AutoRound writes the multi-token-prediction layer into a file that its index lacks."""
    path = build(tmp_path, weights="autoround")
    extra = "model_extra_tensors.safetensors"
    assert extra not in shards(path)
    checkpoint = open_checkpoint(path)
    assert opened(checkpoint) == read_dir(path)
    assert said(checkpoint, extra, "are new and included")


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A checkpoint with a file beside the index: one new, one repeated and one foreign name."""
    path = build(tmp_path / "source")
    names = (f"{P}layers.0.extra.weight", "lm_head.weight", "foreign.weight")
    write_tensors(path / "beside.safetensors", dict.fromkeys(names, blob()))
    return path


def test_a_mixture_beside_the_index_is_refused(mixture: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(mixture)
    assert "beside.safetensors" in refusal.value.message
    assert "1 new tensors" in refusal.value.message
    assert "1 that repeat others and 1 unknown ones" in refusal.value.message
    hint = refusal.value.hint or ""
    assert "--include-file beside.safetensors" in hint
    assert "--ignore-file beside.safetensors" in hint


def test_a_mixture_can_be_included(mixture: Path) -> None:
    original = {n: t for f in shards(mixture) for n, t in read_file(mixture / f).items()}
    checkpoint = open_checkpoint(mixture, include_files=["beside.safetensors"])
    assert opened(checkpoint) == {**original, f"{P}layers.0.extra.weight": blob()}
    assert [t.name for t in checkpoint.left_out] == ["foreign.weight"]


def test_a_mixture_can_be_ignored(mixture: Path) -> None:
    original = {n: t for f in shards(mixture) for n, t in read_file(mixture / f).items()}
    checkpoint = open_checkpoint(mixture, ignore_files=["beside.safetensors"])
    assert opened(checkpoint) == original
    assert checkpoint.left_out == ()


@pytest.mark.parametrize(
    ("names", "accepted"),
    [
        ((f"{P}layers.0.extra.weight", "lm_head.weight"), False),
        ((f"{P}layers.0.extra.weight", "foreign.weight"), False),
        (("lm_head.weight", "foreign.weight"), False),
        ((f"{P}layers.0.extra.weight", f"{P}layers.1.extra.weight"), True),
    ],
    ids=["new+repeated", "new+foreign", "repeated+foreign", "new"],
)
def test_what_a_mixture_is(tmp_path: Path, names: tuple[str, ...], accepted: bool) -> None:
    path = build(tmp_path)
    write_tensors(path / "beside.safetensors", dict.fromkeys(names, blob()))
    if accepted:
        assert set(names) < opened(open_checkpoint(path)).keys()
    else:
        with pytest.raises(CheckpointError, match=r"beside\.safetensors"):
            open_checkpoint(path)


def test_new_weights_in_two_files_beside_the_index(tmp_path: Path) -> None:
    path = build(tmp_path)
    for file in ("one.safetensors", "two.safetensors"):
        write_tensors(path / file, {f"{P}layers.0.extra.weight": blob()})
    with pytest.raises(CheckpointError, match="is in two files") as refusal:
        open_checkpoint(path)
    assert "one.safetensors" in refusal.value.message
    assert "two.safetensors" in refusal.value.message
    assert f"{P}layers.0.extra.weight" in opened(
        open_checkpoint(path, ignore_files=["two.safetensors"])
    )


def test_a_broken_file_beside_the_index(tmp_path: Path) -> None:
    path = build(tmp_path)
    (path / "beside.safetensors").write_bytes(b"not weights")
    with pytest.raises(HeaderError, match=r"beside\.safetensors.*the index does not name") as no:
        open_checkpoint(path)
    assert no.value.hint is not None and "--ignore-file beside.safetensors" in no.value.hint
    assert open_checkpoint(path, ignore_files=["beside.safetensors"]).warnings == ()


@pytest.mark.parametrize("option", ["include_files", "ignore_files"])
def test_options_must_name_a_file_beside_the_index(tmp_path: Path, option: str) -> None:
    path = build(tmp_path)
    for name, words in (
        ("nothing.safetensors", "is no file of the checkpoint"),
        ("config.json", "is no file of the checkpoint"),
        ("../x.safetensors", "is no file of the checkpoint"),
        (shards(path)[0], "is named by the index"),
    ):
        with pytest.raises(UsageError, match=words):
            open_checkpoint(path, **{option: [name]})


def test_without_an_index_a_file_can_be_ignored(tmp_path: Path) -> None:
    path = build(tmp_path, shards=1, index=False)
    before = opened(open_checkpoint(path))
    shutil.copy(path / "model.safetensors", path / "copy.safetensors")
    with pytest.raises(CheckpointError, match="is in two files"):
        open_checkpoint(path)
    assert opened(open_checkpoint(path, ignore_files=["copy.safetensors"])) == before


# --- fused and per-expert forms -------------------------------------------------------------------


def per_expert(layer: int) -> dict[str, Blob]:
    module = f"{P}layers.{layer}.mlp.experts"
    projections = ("gate", "up", "down")
    return {f"{module}.{e}.{p}_proj.weight": blob(e) for e in range(8) for p in projections}


def test_fused_and_per_expert_tensors_of_one_module_are_refused(tmp_path: Path) -> None:
    path = build(tmp_path, shards=1, index=False)
    write_tensors(path / "model.safetensors", {**read_dir(path), **per_expert(3)})
    with pytest.raises(CheckpointError, match="has both fused and per-expert tensors") as refusal:
        open_checkpoint(path)
    assert f"{P}layers.3.mlp.experts" in refusal.value.message


def test_a_file_beside_the_index_may_not_bring_the_other_form(tmp_path: Path) -> None:
    path = build(tmp_path)
    write_tensors(path / "beside.safetensors", per_expert(3))
    for options in ({}, {"include_files": ["beside.safetensors"]}):
        with pytest.raises(CheckpointError, match="both fused and per-expert") as refusal:
            open_checkpoint(path, **options)
        assert "beside.safetensors" in refusal.value.message
    assert open_checkpoint(path, ignore_files=["beside.safetensors"]).warnings == ()


def test_layers_may_differ_in_form(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(build(tmp_path, weights="mixed"))
    assert checkpoint.layouts.of(mtp=False) == "mixed"
    assert checkpoint.layouts.of(mtp=True) == "per_expert"
    assert checkpoint.warnings == ()


# --- side files -----------------------------------------------------------------------------------


def test_side_files_are_everything_but_weights(tmp_path: Path) -> None:
    path = build(tmp_path)
    carried = {file for file in open_checkpoint(path).side_files}
    assert {"config.json", "tokenizer.json", "merges.txt", "LICENSE"} <= carried
    assert not carried & {"README.md", ".gitattributes", INDEX}
    more = ["recipe.yaml", "LICENSE.txt", "Notice", "a b", "x.py", "\u00e9.txt"]
    weights = ["a.bin", "a.pt", "a.pth", "a.gguf", "a.onnx", "a.msgpack", "a.h5", "A.BIN"]
    others = ["b.index.json", ".gitignore", ".cache-x", ".reshard-note"]
    for name in (*more, *weights, *others):
        (path / name).write_bytes(b"x")
    (path / ".cache").mkdir()
    (path / "assets").mkdir()
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.side_files) == carried | set(more)
    assert said(checkpoint, "sub-directories", "assets")


@pytest.mark.parametrize(
    "name", ["stage-00-of-02", "a\\b", b"\xff".decode("utf-8", "surrogateescape")]
)
def test_side_file_that_cannot_be_carried_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = build(tmp_path / "source")
    (path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be carried along"):
        open_checkpoint(path)


def test_experts_of_other_modules_do_not_count_as_layouts(tmp_path: Path) -> None:
    """Only those of the decoder and of mtp do: `--exclude visual` must not change the facts."""
    path = build(tmp_path / "source", shards=1, index=False)
    tensors = read_dir(path)
    tensors["model.visual.blocks.0.mlp.experts.0.gate_proj.weight"] = ("U8", (1,), b"1")
    write_tensors(path / "model.safetensors", tensors)
    assert open_checkpoint(path).layouts.of(mtp=False) == "fused"


@pytest.mark.parametrize(
    "name", ["mtp.SAFETENSORS", b"x\xff.safetensors".decode("utf-8", "surrogateescape")]
)
@pytest.mark.parametrize("index", [False, True])
def test_weight_file_that_would_be_overlooked_is_refused(
    tmp_path: Path, name: str, index: bool
) -> None:
    path = build(tmp_path / "source", shards=1, index=False)
    if index:
        path = build(tmp_path / "indexed")
    write_tensors(path / name, {"mtp.extra.weight": ("U8", (1,), b"1")})
    with pytest.raises(CheckpointError, match="would be overlooked or could not be named"):
        open_checkpoint(path)
