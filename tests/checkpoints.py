"""Checkpoints for tests: every model family and weight format, tiny or at the true size.

`examples/tiny_checkpoint.py` holds the plain Qwen3.5 MoE grammar; this module varies it:

* `build` writes a tiny checkpoint of any family and format,
* `inventory`, `config` and `write_sparse` give released models at their true size,
* `read_dir` and `read_file` read tensors back through the safetensors library,
* `hostile_files` and `huge_files` are inputs for a robust header reader.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors

from examples import tiny_checkpoint as tiny
from examples.tiny_checkpoint import FORMAT, LANGUAGE_MODEL, Dims, Part, Tensors, nbytes

Blob = tuple[str, tuple[int, ...], bytes]
"""dtype, shape and raw bytes of one tensor."""

Mtp = Literal["fused", "per_expert"]
"""The expert layout of the mtp layer; releases mix it freely with that of the body."""


# --- families -------------------------------------------------------------------------------------


class Family(NamedTuple):
    """A model family. `hybrid`: the Qwen3.5 line, with linear attention and multi-token prediction.

    `stem` starts the names of its transformers classes; `sparse` families have experts;
    `visual` ones have a vision tower unless the checkpoint is text-only.
    """

    stem: str
    hybrid: bool
    sparse: bool
    visual: bool = True


FAMILIES = {
    "qwen3_5_moe": Family("Qwen3_5Moe", hybrid=True, sparse=True),
    "qwen3_vl_moe": Family("Qwen3VLMoe", hybrid=False, sparse=True),
    "qwen3_5": Family("Qwen3_5", hybrid=True, sparse=False),
    "qwen3_vl": Family("Qwen3VL", hybrid=False, sparse=False),
    "qwen3_moe": Family("Qwen3Moe", hybrid=False, sparse=True, visual=False),
}

# The Qwen3 line: softmax attention without output gate in every layer, no shared expert.
QWEN3 = Dims(
    full_attention_interval=1,
    attn_output_gate=False,
    shared_expert_intermediate_size=0,
    vision_depth=5,
    vision_deepstack_visual_indexes=(0, 2, 3),
)


@dataclass(frozen=True)
class Model:
    """All that decides a checkpoint's tensors and config.json.

    `block` is the side of a quantisation block; `f32_state` tells Qwen3.5, which keeps `A_log` and
    `linear_attn.norm` in F32, from Qwen3.6, which does not; `kv_scales` adds scales of a KV cache.
    """

    family: str
    dims: Dims
    weights: str = "bf16"
    mtp: Mtp | None = None
    tied: bool = False
    text_only: bool = False
    block: int = 128
    f32_state: bool = True
    kv_scales: bool = False


def transposed_experts(prefix: str, d: Dims) -> Tensors:
    """Fused experts as the Qwen3-VL MoE releases have them: `[E, H, 2I]` and `[E, I, H]`."""
    fused = tiny.fused_experts(prefix, d)
    return {name: (dtype, (e, cols, rows)) for name, (dtype, (e, rows, cols)) in fused.items()}


def nvfp4_fused_experts(prefix: str, d: Dims) -> Tensors:
    """Fused modelopt experts: packed pairs, a scale per 16 elements, one per expert (and half)."""
    tensors: Tensors = {}
    for name, (_, (experts, rows, cols)) in tiny.fused_experts(prefix, d).items():
        halves = 2 if name.endswith("gate_up_proj") else 1
        tensors[name] = ("U8", (experts, rows, cols // 2))
        tensors[f"{name}_scale"] = ("F8_E4M3", (experts, rows, _blocks(cols, 16)))
        tensors[f"{name}_scale_2"] = ("F32", (experts, halves))
        tensors[f"{name}.input_scale"] = ("F32", ())
    return tensors


def dense_mlp(prefix: str, d: Dims) -> Tensors:
    """The one MLP of a dense layer: gate and up `[I, H]`, down `[H, I]`."""
    return tiny.gated_mlp(f"{prefix}mlp.", d.hidden_size, d.moe_intermediate_size)


def _mlp(model: Model) -> Part:
    """The MLP of the model's decoder layers, BF16 but for `nvfp4_fused`."""
    if not FAMILIES[model.family].sparse:
        return dense_mlp
    fused = transposed_experts if model.family == "qwen3_vl_moe" else tiny.fused_experts

    def mixed(prefix: str, d: Dims) -> Tensors:
        return (fused if ".layers.0." in prefix else tiny.separate_experts)(prefix, d)

    layouts: dict[str, Part] = {"mixed": mixed, "nvfp4_fused": nvfp4_fused_experts}
    if model.family != "qwen3_moe":  # released per expert
        layouts["bf16"] = fused
    return partial(tiny.moe, experts=layouts.get(model.weights, tiny.separate_experts))


def _mtp_mlp(model: Model) -> Part:
    if not FAMILIES[model.family].sparse:
        return dense_mlp
    experts = tiny.fused_experts if model.mtp == "fused" else tiny.separate_experts
    return partial(tiny.moe, experts=experts)


def _bf16_tensors(model: Model) -> Tensors:
    """The model's tensors before quantisation."""
    prefix = LANGUAGE_MODEL if _wrapped(model) else "model."
    tensors = tiny.language_model(prefix, model.dims, _mlp(model))
    if not model.f32_state:
        states = {name: tensor for name, tensor in tensors.items() if ".linear_attn." in name}
        tensors |= {name: ("BF16", shape) for name, (_, shape) in states.items()}
    if not model.tied:
        tensors |= tiny.head(model.dims)
    if model.mtp:
        tensors |= tiny.mtp(model.dims, _mtp_mlp(model))
    if _wrapped(model):
        tensors |= tiny.visual(model.dims)
    return tensors


def _wrapped(model: Model) -> bool:
    """Is the language model one of two parts, beside a vision tower?"""
    return FAMILIES[model.family].visual and not model.text_only


def _shard_name(model: Model) -> str:
    """Qwen3.5 names shards in its own way, Qwen3.6 (see `f32_state`) and others as usual."""
    qwen3_5 = FAMILIES[model.family].hybrid and model.f32_state
    return tiny.SHARD_NAME if qwen3_5 else "model-{:05d}-of-{:05d}.safetensors"


# --- weight formats -------------------------------------------------------------------------------


class Format(NamedTuple):
    """A quantisation format.

    `covers` matches, in full, the names of the weights `[rows, columns]` that it packs; `pack`
    turns (rows, columns, block) into the parts, suffix -> (dtype, shape); `config` turns the block
    and the names of the modules left alone into a `quantization_config`.
    """

    covers: re.Pattern[str]
    pack: Callable[[int, int, int], Tensors]
    config: Callable[[int, list[str]], dict[str, Any]]


def _blocks(size: int, block: int) -> int:
    """How many blocks cover `size` elements; the last may be partial."""
    return -(-size // block)


def _fp8(rows: int, cols: int, block: int) -> Tensors:
    scale = (_blocks(rows, block), _blocks(cols, block))
    return {"weight": ("F8_E4M3", (rows, cols)), "weight_scale_inv": ("BF16", scale)}


def _gptq(rows: int, cols: int, block: int) -> Tensors:
    return {**_autoround(rows, cols, block), "g_idx": ("I32", (cols,))}


def _autoround(rows: int, cols: int, block: int) -> Tensors:
    groups = _blocks(cols, block)
    return {
        "qweight": ("I32", (cols // 8, rows)),
        "qzeros": ("I32", (groups, rows // 8)),
        "scales": ("F16", (groups, rows)),
    }


def _awq(rows: int, cols: int, block: int) -> Tensors:
    groups = _blocks(cols, block)
    return {
        "weight_packed": ("I32", (rows, cols // 8)),
        "weight_scale": ("BF16", (rows, groups)),
        "weight_shape": ("I64", (2,)),
        "weight_zero_point": ("I32", (rows // 8, groups)),
    }


def _nvfp4(rows: int, cols: int, block: int) -> Tensors:
    return {
        "weight": ("U8", (rows, cols // 2)),
        "weight_scale": ("F8_E4M3", (rows, _blocks(cols, 16))),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }


def _mxfp4(rows: int, cols: int, block: int) -> Tensors:
    scale = (rows, _blocks(cols, 32))
    return {"weight": ("U8", (rows, cols // 2)), "weight_scale": ("U8", scale)}


def _fp8_config(block: int, skipped: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [block, block],
        "modules_to_not_convert": skipped,
    }


def _gptq_config(block: int, skipped: list[str]) -> dict[str, Any]:
    rules = (".*attn.*", ".*shared_expert.*", ".*visual.*", ".*mtp.*")
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": block,
        "desc_act": False,
        "lm_head": False,
        "dynamic": {f"-:{rule}": {} for rule in rules},
    }


def _autoround_config(block: int, skipped: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": block,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {module: {"bits": 16} for module in skipped},
    }


def _awq_config(block: int, skipped: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 4, "strategy": "group", "group_size": block, "symmetric": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": skipped,
    }


def _nvfp4_config(block: int, skipped: list[str]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": skipped}


def _mxfp4_config(block: int, skipped: list[str]) -> dict[str, Any]:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight},
        "exclude": skipped,
    }


_PROJ = r"(gate|up|down)_proj"
_ROUTED = rf"model\..*\.mlp\.(experts\.\d+\.)?{_PROJ}\.weight"
_ATTENTION = r"self_attn\.[qkvo]_proj"
_LINEAR_ATTENTION = r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
_ALL_LINEAR = (
    rf".*\.(mlp\.(experts\.\d+\.|shared_expert\.)?{_PROJ}|{_ATTENTION}|{_LINEAR_ATTENTION})\.weight"
)

FORMATS = {
    "fp8": Format(re.compile(_ALL_LINEAR), _fp8, _fp8_config),
    "gptq": Format(re.compile(_ROUTED), _gptq, _gptq_config),
    "awq": Format(re.compile(_ROUTED), _awq, _awq_config),
    "nvfp4": Format(re.compile(rf"{_ROUTED}|lm_head\.weight"), _nvfp4, _nvfp4_config),
    "nvfp4_fused": Format(re.compile(r"lm_head\.weight"), _nvfp4, _nvfp4_config),
    "mxfp4": Format(re.compile(_ROUTED), _mxfp4, _mxfp4_config),
    "autoround": Format(  # the one that packs the mtp layer too, into a file of its own
        re.compile(rf".*\.(mlp\.(experts\.\d+\.)?{_PROJ}|{_ATTENTION})\.weight"),
        _autoround,
        _autoround_config,
    ),
}

WEIGHTS = ("bf16", "bf16_per_expert", "mixed", *FORMATS)
"""Every value of `weights`: BF16 as released, per expert, or both in turn; and the formats."""


def _tensors(model: Model) -> Tensors:
    """The model's tensors, quantised as it says."""
    tensors = _bf16_tensors(model)
    if form := FORMATS.get(model.weights):
        packed: Tensors = {}
        for name, (dtype, shape) in tensors.items():
            if form.covers.fullmatch(name):
                module, (rows, cols) = name.removesuffix("weight"), shape
                parts = form.pack(rows, cols, model.block)
                packed |= {f"{module}{part}": tensor for part, tensor in parts.items()}
            else:
                packed[name] = (dtype, shape)
        tensors = packed
    if model.kv_scales:
        layers = [name.removesuffix("k_norm.weight") for name in tensors if "k_norm" in name]
        for layer in layers:
            tensors[f"{layer}k_proj.k_scale"] = tensors[f"{layer}v_proj.v_scale"] = ("F32", ())
    return tensors


# --- config.json ----------------------------------------------------------------------------------

_HYBRID_KEYS = re.compile(
    "linear_|mtp_|mamba_|layer_types|full_attention_|attn_output_|shared_expert_|rope_parameters"
)
_SPARSE_KEYS = re.compile("num_experts|moe_|shared_expert_")


def _config(model: Model) -> dict[str, Any]:
    """The model's config.json; text-only ones are flat, others nest the text model's part."""
    family = FAMILIES[model.family]
    config = tiny.config(model.dims)
    text = _text_config(model, config["text_config"])
    shared: dict[str, Any] = {"tie_word_embeddings": model.tied}
    if form := FORMATS.get(model.weights):
        shared["quantization_config"] = form.config(model.block, _left_alone(model, form))
    if not _wrapped(model):
        return {"architectures": [f"{family.stem}ForCausalLM"], **text, **shared}
    config["architectures"] = [f"{family.stem}ForConditionalGeneration"]
    config["model_type"] = config["vision_config"]["model_type"] = model.family
    return {**config, "text_config": text, **shared}


def _text_config(model: Model, text: dict[str, Any]) -> dict[str, Any]:
    """The Qwen3.5 MoE `text_config` turned into that of the model's family."""
    family, d = FAMILIES[model.family], model.dims
    text["model_type"] = f"{model.family}_text" if family.visual else model.family
    text["mtp_num_hidden_layers"] = int(model.mtp is not None)
    if not family.hybrid:
        text = {key: value for key, value in text.items() if not _HYBRID_KEYS.match(key)}
        text["rope_theta"] = 5000000
    if not family.hybrid and family.visual:
        side = d.head_dim * 5 // 32
        section = [d.head_dim // 2 - 2 * side, side, side]
        text["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": section}
        text["rope_scaling"]["rope_type"] = "default"
    if not family.hybrid and family.sparse:
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    if not family.sparse:
        text = {key: value for key, value in text.items() if not _SPARSE_KEYS.match(key)}
        text["intermediate_size"] = d.moe_intermediate_size
    return text


def _left_alone(model: Model, form: Format) -> list[str]:
    """The matrices that a format does not cover, under their full names."""
    return [
        name.removesuffix(".weight")
        for name, (_, shape) in _bf16_tensors(model).items()
        if name.endswith(".weight") and len(shape) > 1 and not form.covers.fullmatch(name)
    ]


# --- released models ------------------------------------------------------------------------------

_QWEN3_5_35B = Dims(
    hidden_size=2048,
    num_hidden_layers=40,
    vocab_size=248320,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_attention_heads=16,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vision_depth=27,
    vision_hidden_size=1152,
    vision_intermediate_size=4304,
    vision_num_heads=16,
    vision_num_position_embeddings=2304,
    vision_patch_size=16,
)
_QWEN3_5_122B = replace(
    _QWEN3_5_35B,
    hidden_size=3072,
    num_hidden_layers=48,
    moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024,
    num_attention_heads=32,
    linear_num_value_heads=64,
)
_QWEN3_5_397B = replace(
    _QWEN3_5_122B, hidden_size=4096, num_hidden_layers=60, num_experts=512, num_experts_per_tok=10
)
_QWEN3_VL_30B = replace(
    _QWEN3_5_35B,
    num_hidden_layers=48,
    vocab_size=151936,
    num_experts=128,
    moe_intermediate_size=768,
    shared_expert_intermediate_size=0,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    attn_output_gate=False,
    full_attention_interval=1,
    vision_deepstack_visual_indexes=(8, 16, 24),
)
_QWEN3_VL_235B = replace(
    _QWEN3_VL_30B,
    hidden_size=4096,
    num_hidden_layers=94,
    moe_intermediate_size=1536,
    num_attention_heads=64,
)

_3_5 = partial(Model, "qwen3_5_moe", mtp="per_expert")
_3_6 = partial(Model, "qwen3_5_moe", f32_state=False)

RELEASES = {
    "Qwen3.5-35B-A3B": _3_5(_QWEN3_5_35B),
    "Qwen3.5-35B-A3B-MXFP4": _3_5(_QWEN3_5_35B, weights="mxfp4"),
    "Qwen3.6-35B-A3B": _3_6(_QWEN3_5_35B, mtp="fused"),
    "Qwen3.6-35B-A3B-FP8": _3_6(_QWEN3_5_35B, weights="fp8", mtp="per_expert"),
    "Qwen3.5-122B-A10B": _3_5(_QWEN3_5_122B),
    "Qwen3.5-397B-A17B": _3_5(_QWEN3_5_397B),
    "Qwen3.5-397B-A17B-FP8": _3_5(_QWEN3_5_397B, weights="fp8"),
    "Qwen3-VL-30B-A3B": Model("qwen3_vl_moe", _QWEN3_VL_30B),
    "Qwen3-VL-235B-A22B": Model("qwen3_vl_moe", _QWEN3_VL_235B),
}


def inventory(model: str) -> Tensors:
    """Every tensor of a released model (a key of `RELEASES`) at its true size."""
    return _tensors(RELEASES[model])


def config(model: str) -> dict[str, Any]:
    """The config.json of a released model, down to the fields that matter here."""
    return _config(RELEASES[model])


def write_sparse(path: Path, model: str, shards: int) -> Path:
    """Write a released model at its true size: real headers, index and config over holes as data.

    Tensors fill about `shards` equal shards in inventory order; the files take next to no disk.
    """
    tensors = inventory(model)
    limit = tiny.total_bytes(tensors) / shards
    filled = 0
    contents: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
    for name, (dtype, shape) in tensors.items():
        if filled >= limit * len(contents):
            contents.append({})
        contents[-1][name] = (dtype, shape, nbytes(dtype, shape))
        filled += nbytes(dtype, shape)

    path.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, sized in enumerate(contents, start=1):
        file = _shard_name(RELEASES[model]).format(number, len(contents))
        header = tiny.encode_header(sized, FORMAT)
        (path / file).write_bytes(header)
        os.truncate(path / file, len(header) + sum(size for _, _, size in sized.values()))
        files[file] = list(sized)
    tiny.write_index(path, files, filled)
    tiny.write_json(path / "config.json", config(model))
    return path


# --- tiny checkpoints -----------------------------------------------------------------------------


def build(
    path: Path,
    family: str = "qwen3_5_moe",
    *,
    weights: str = "bf16",
    mtp: Mtp | Literal["hub"] | None = "hub",
    tied: bool = False,
    text_only: bool = False,
    layers: int = 8,
    experts: int = 8,
    shards: int = 4,
    seed: int = 0,
    index: bool = True,
    total_size: Callable[[int], float] = int,
    side_files: bool = True,
    metadata: Mapping[str, str] | None = FORMAT,
    **sizes: Any,
) -> Path:
    """Write a tiny checkpoint of random bytes into the directory `path` and return it.

    family: a key of `FAMILIES`. weights: one of `WEIGHTS`. mtp: "hub" is what releases have, per
    expert but fused beside NVFP4, and none outside the Qwen3.5 line. tied: no lm_head. text_only:
    names under `model.`, no vision tower, a flat config. shards: 1 gives `model.safetensors`.
    seed: decides the bytes and which shard a tensor lies in; the bytes depend on seed and name
    only. total_size: what the index says, given the true sum (some releases write a float).
    sizes: other fields of `Dims`.
    """
    kind = FAMILIES[family]
    if mtp == "hub":
        mtp = None if not kind.hybrid else "fused" if "nvfp4" in weights else "per_expert"
    if weights not in WEIGHTS or (mtp and not kind.hybrid):
        raise ValueError(f"no {family} checkpoint has weights={weights!r}, mtp={mtp!r}")
    dims = replace(
        Dims() if kind.hybrid else QWEN3, num_hidden_layers=layers, num_experts=experts, **sizes
    )
    kv_scales = weights == "fp8"
    model = Model(family, dims, weights, mtp, tied, text_only, block=16, kv_scales=kv_scales)
    tensors = _tensors(model)
    beside = {n: t for n, t in tensors.items() if weights == "autoround" and n.startswith("mtp.")}
    indexed = {name: tensor for name, tensor in tensors.items() if name not in beside}

    path.mkdir(parents=True, exist_ok=True)
    write = partial(tiny.write_shards, path, seed=seed, metadata=metadata, index=False)
    name = "model.safetensors" if shards == 1 else _shard_name(model)
    files = write(indexed, shards=shards, shard_name=name)
    if beside:
        write(beside, shards=1, shard_name="model_extra_tensors.safetensors")
    if index:
        tiny.write_index(path, files, total_size(tiny.total_bytes(indexed)))
    tiny.write_json(path / "config.json", _config(model))
    if side_files:
        _write_side_files(path, model)
    return path


def _write_side_files(path: Path, model: Model) -> None:
    """The files beside weights and config.json, with those of the quantisation tool."""
    tiny.write_side_files(path)
    quantization = _config(model).get("quantization_config", {})
    if model.weights == "awq":
        (path / "recipe.yaml").write_text("quant_stage: {}\n", encoding="utf-8")
    elif model.weights == "autoround":
        tiny.write_json(path / "quantization_config.json", quantization)
    elif model.weights.startswith("nvfp4"):
        settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
        settings["exclude_modules"] = quantization["ignore"]
        modelopt = {"producer": {"name": "modelopt"}, "quantization": settings}
        tiny.write_json(path / "hf_quant_config.json", modelopt)


# --- reading and writing tensors ------------------------------------------------------------------


def write_tensors(
    path: Path, tensors: Mapping[str, Blob], metadata: Mapping[str, str] | None = FORMAT
) -> None:
    """Write one safetensors file with the given bytes, in order; any dtype string goes."""
    sized = {name: (dtype, shape, len(data)) for name, (dtype, shape, data) in tensors.items()}
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(tiny.encode_header(sized, metadata) + data)


def read_file(path: Path) -> dict[str, Blob]:
    """All tensors of one file, as the safetensors library reads them."""
    return {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }


def read_dir(path: Path) -> dict[str, Blob]:
    """All tensors of the `*.safetensors` directly in `path`, whatever an index says.

    Raises ValueError if files hold different tensors under one name.
    """
    tensors: dict[str, Blob] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in read_file(file).items():
            if tensors.setdefault(name, tensor) != tensor:
                raise ValueError(f"{file}: {name} differs from its namesake in another file")
    return tensors


# --- hostile files --------------------------------------------------------------------------------


Broken = tuple[bytes, tuple[str, ...]]
"""A file to refuse, and words that the error message must contain."""


class HostileFile(NamedTuple):
    """One input for a header reader.

    A valid file has `accept`; for any other the error message must contain each of `words`.
    """

    id: str
    data: bytes
    accept: bool
    words: tuple[str, ...] = ()


def _u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def _raw(header: bytes, size: int = 4) -> bytes:
    """A file with exactly this header (unpadded) and `size` bytes of data."""
    return _u64(len(header)) + header + bytes(range(size))


def _entry(dtype: object, shape: object, *offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _file(size: int, **entries: object) -> bytes:
    """A file whose header has these entries, with `size` bytes of data."""
    return _raw(json.dumps(entries).encode(), size)


_U8 = _entry("U8", [4], 0, 4)  # the ordinary tensor of the files below
_JSON = json.dumps({"alpha": _U8}).encode()


def _valid_files() -> dict[str, bytes]:
    """Unusual, but within the format."""
    names = {
        "name-empty": "",
        "name-with-nul": "al\0pha",
        "name-with-5000-digits": "model.layers." + "9" * 5000 + ".weight",
        "name-with-non-ascii-digits": "model.layers.\u0663.weight",
        "name-with-leading-zero": "model.layers.01.weight",
        "name-with-superscript": "model.layers.\u00b2.weight",
    }
    unknown = {"F31": 1, "f32": 1, "I4": 8, "U4": 8, "F8_E4M3FN": 4}
    empty = {"empty": _entry("U8", [0, 4], 4, 4), "omega": _entry("U8", [4], 4, 8)}
    odd = {"alpha": _entry("U8", [3], 0, 3), "omega": _entry("F32", [1], 3, 7)}
    return {
        "newlines-after-json": _raw(_JSON + b"\n\n"),
        "spaces-after-json": _raw(_JSON + b"   "),
        "metadata-null": _file(4, __metadata__=None, alpha=_U8),
        "extra-field": _file(4, alpha={**_U8, "note": {"a": [1]}}),
        "unsorted-entries": _file(8, omega=_entry("U8", [4], 4, 8), alpha=_U8),
        "unaligned-header": _raw(_JSON + b" " * ((1 - len(_JSON)) % 8)),
        "f32-at-offset-3": _file(7, **odd),
        "zero-size-between": _file(8, alpha=_U8, **empty),
        "zero-size-alone": _file(0, alpha=_entry("U8", [0, 4], 0, 0)),
        "scalar": _file(4, alpha=_entry("F32", [], 0, 4)),
        "no-tensors": _file(0),
        "metadata-alone": _file(0, __metadata__={"format": "pt"}),
        "bool-bytes-2-and-3": _file(4, alpha=_entry("BOOL", [4], 0, 4)),
        "f4": _file(4, alpha=_entry("F4", [1, 8], 0, 4)),
        "f6-e2m3": _file(3, alpha=_entry("F6_E2M3", [4], 0, 3)),
        "f6-e3m2": _file(3, alpha=_entry("F6_E3M2", [4], 0, 3)),
        **{f"dtype-{d}": _file(4, alpha=_entry(d, [n], 0, 4)) for d, n in unknown.items()},
        **{id: _file(4, **{name: _U8}) for id, name in names.items()},
    }


def _broken_lengths() -> dict[str, Broken]:
    """Files that end, or go wrong, before there is a header to parse."""
    limit = "exceeds the limit of 100,000,000"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
    return {
        "empty": (b"", ("file is empty",)),
        "seven-bytes": (_u64(2)[:7], ("shorter than 8 bytes",)),
        "length-0": (_u64(0) + b"{}", ("header length 0",)),
        "length-past-end": (_u64(1000) + b"{}", ("header needs", "truncated")),
        "length-over-limit": (_u64(100_000_001) + b"{}", (limit,)),
        "length-2-to-the-64": (_u64(2**64 - 1) + b"{}", (limit,)),
        "git-lfs-pointer": (pointer, ("git-lfs pointer",)),
        "web-page": (b"<!DOCTYPE html>\n<html><body>404</body></html>\n", ("web page",)),
    }


def _broken_json() -> dict[str, Broken]:
    """Headers that are not the JSON object they should be."""
    bad, shape = ("not valid JSON",), b'{"alpha":{"dtype":"U8","data_offsets":[0,4],"shape":[%s]}}'
    twice = b'{"alpha":%s,"alpha":%s}'
    same, other = json.dumps(_U8).encode(), json.dumps(_entry("U8", [4], 4, 8)).encode()
    metadata = b'"__metadata__":{"format":"pt"}'
    text = ("metadata must map text to text",)
    return {
        "not-json": (_raw(b'{"alpha":'), bad),
        "garbage-after-json": (_raw(_JSON + b"x"), bad),
        "nested-100000-deep": (_raw(b'{"alpha":' + b"[" * 100_000), bad),
        "not-utf-8": (_raw(_JSON.replace(b"alpha", b"\xff")), ("not valid UTF-8",)),
        "lone-surrogate": (_raw(_JSON.replace(b"alpha", b"\\ud800")), ("bad escape",)),
        "list-at-top": (_raw(b"[" + _JSON + b"]"), ("header must",)),
        "null-at-top": (_raw(b"null"), ("header must",)),
        "space-before-json": (_raw(b" " + _JSON), ("must start with",)),
        "duplicate-equal": (_raw(twice % (same, same)), ("duplicate tensor name", "alpha")),
        "duplicate-different": (_raw(twice % (same, other), 8), ("duplicate tensor name", "alpha")),
        "duplicate-metadata": (
            _raw(b"{" + metadata + b"," + metadata + b"}", 0),
            ("duplicate", "__metadata__"),
        ),
        "metadata-number": (_file(4, __metadata__={"step": 1}, alpha=_U8), text),
        "metadata-nested": (_file(4, __metadata__={"a": {"b": "c"}}, alpha=_U8), text),
        "metadata-list": (_file(4, __metadata__=["pt"], alpha=_U8), text),
        "nan-in-shape": (_raw(shape % b"NaN"), ()),
        "number-with-5000-digits": (_raw(shape % (b"9" * 5000)), ()),
        "entry-not-an-object": (_file(4, alpha=[_U8]), ("alpha",)),
    }


def _broken_entries() -> dict[str, Broken]:
    """Entries that contradict themselves or each other, or do not cover the data exactly."""

    def lacking(field: str) -> bytes:
        return _file(4, alpha={key: value for key, value in _U8.items() if key != field})

    def pair(size: int, begin: int, end: int) -> bytes:
        return _file(size, alpha=_U8, omega=_entry("U8", [end - begin], begin, end))

    def offsets(*offsets: object) -> Broken:
        return _file(4, alpha=_entry("U8", [4], *offsets)), ("bad data_offsets", "alpha")

    def shape(*shape: object) -> Broken:
        return _file(4, alpha=_entry("U8", shape, 0, 4)), ("bad shape", "alpha")

    overlap = ("alpha", "omega", "overlap")
    return {
        "lacks-dtype": (lacking("dtype"), ("lacks dtype", "alpha")),
        "lacks-shape": (lacking("shape"), ("lacks shape", "alpha")),
        "lacks-data-offsets": (lacking("data_offsets"), ("lacks data_offsets", "alpha")),
        "hole": (pair(12, 8, 12), ("alpha", "omega", "gap at byte 4")),
        "hole-at-start": (_file(8, alpha=_entry("U8", [4], 4, 8)), ("alpha", "gap at byte 0")),
        "overlap": (pair(6, 2, 6), overlap),
        "range-twice": (pair(4, 0, 4), overlap),
        "zero-size-inside": (pair(4, 2, 2), overlap),
        "trailing-bytes": (_file(9, alpha=_U8), ("5 bytes not described by the header",)),
        "truncated-data": (_file(3, alpha=_U8), ("1 bytes early", "truncated")),
        "offsets-reversed": offsets(4, 0),
        "offset-negative": offsets(-4, 0),
        "offset-float": offsets(0, 4.0),
        "offset-boolean": offsets(False, 4),
        "offsets-three": offsets(0, 4, 4),
        "offset-2-to-the-64": offsets(0, 2**64),
        "size-mismatch": (
            _file(4, alpha=_entry("F32", [2], 0, 4)),
            ("alpha", "needs 8 bytes", "offsets give 4"),
        ),
        "shape-overflow": shape(2**63, 2**63),
        "shape-overflow-to-0": (
            _file(0, alpha=_entry("U8", [2**32, 2**32], 0, 0)),
            ("shape", "alpha"),
        ),
        "dimension-negative": shape(-4),
        "dimension-float": shape(4.0),
        "dimension-boolean": shape(True, 4),
        "f4-odd-count": (
            _file(2, alpha=_entry("F4", [3], 0, 2)),
            ("alpha", "4-bit tensor with odd element count"),
        ),
    }


def hostile_files() -> list[HostileFile]:
    """Files at and beyond the edges of the format, for a strict reader; 100 kB at most.

    It differs from safetensors 0.8 twice. It refuses what that takes by leniency: a space before
    the header, equal duplicates. It takes dtypes that the library does not know, their size given
    by the offsets: to copy bytes one need not know what they mean.
    """
    valid = [HostileFile(id, data, True) for id, data in _valid_files().items()]
    broken = _broken_lengths() | _broken_json() | _broken_entries()
    return valid + [HostileFile(id, data, False, words) for id, (data, words) in broken.items()]


def huge_files() -> list[HostileFile]:
    """Valid files with a header of 1 MB and of 15 MB. Build them in a test, not at import."""
    many = {f"model.layers.{n}.weight": _entry("U8", [0], 0, 0) for n in range(200_000)}
    return [
        HostileFile("name-of-1-mb", _file(4, **{"a" * 1_000_000: _U8}), True),
        HostileFile("200000-tensors", _file(0, **many), True),
    ]
