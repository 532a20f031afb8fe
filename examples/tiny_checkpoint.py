"""Write a tiny Qwen3.5 MoE checkpoint of random bytes: `python examples/tiny_checkpoint.py DIR`.

The result has everything the real releases have (vision tower, hybrid decoder layers, fused
experts, a multi-token-prediction layer, several shards, an index, tokenizer files), in less than
2 MB and without any dependency, so it is the quickest way to try `reshard`. It is also the
shortest description of the format: the functions below spell out every tensor name and shape of
the Qwen3.5 MoE family. With the sizes of a real release in `Dims` they give that release's names.

Weights are noise: copy them, compare them, but expect no sense from them.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype, shape), in file order."""

BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E8M0": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype that safetensors 0.8 knows."""

LANGUAGE_MODEL = "model.language_model."
FORMAT = {"format": "pt"}
SHARD_NAME = "model.safetensors-{:05d}-of-{:05d}.safetensors"


@dataclass(frozen=True)
class Dims:
    """Model sizes under their config.json keys (`vision_*` belong to `vision_config`).

    The defaults are tiny, yet keep what matters: hidden size != 2 x expert size (so the shape of
    a fused expert tensor tells its orientation) and two full-attention layers among eight.
    """

    hidden_size: int = 32
    num_hidden_layers: int = 8
    vocab_size: int = 160
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 24
    shared_expert_intermediate_size: int = 40
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    attn_output_gate: bool = True
    full_attention_interval: int = 4
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 8
    linear_value_head_dim: int = 8
    linear_conv_kernel_dim: int = 4
    vision_depth: int = 3
    vision_hidden_size: int = 16
    vision_intermediate_size: int = 24
    vision_num_heads: int = 2
    vision_num_position_embeddings: int = 16
    vision_in_channels: int = 3
    vision_patch_size: int = 4
    vision_temporal_patch_size: int = 2
    vision_spatial_merge_size: int = 2
    vision_deepstack_visual_indexes: tuple[int, ...] = ()


Part = Callable[[str, Dims], Tensors]
"""A piece of the model: the name prefix and the sizes give its tensors."""


# --- the naming grammar ---------------------------------------------------------------------------


def bf16(prefix: str, **shapes: tuple[int, ...]) -> Tensors:
    """BF16 weights: module name below `prefix` = shape."""
    return {f"{prefix}{module}.weight": ("BF16", shape) for module, shape in shapes.items()}


def attention(prefix: str, d: Dims) -> Tensors:
    """Softmax attention. With an output gate, `q_proj` holds query and gate, head by head."""
    q, kv = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
    return bf16(
        f"{prefix}self_attn.",
        q_proj=(q * (1 + d.attn_output_gate), d.hidden_size),
        k_proj=(kv, d.hidden_size),
        v_proj=(kv, d.hidden_size),
        o_proj=(d.hidden_size, q),
        q_norm=(d.head_dim,),
        k_norm=(d.head_dim,),
    )


def linear_attention(prefix: str, d: Dims) -> Tensors:
    """Gated DeltaNet. Two names lack `.weight`; Qwen3.5 keeps the decay and the norm in F32."""
    prefix += "linear_attn."
    heads, values = d.linear_num_value_heads, d.linear_num_value_heads * d.linear_value_head_dim
    qkv = 2 * d.linear_num_key_heads * d.linear_key_head_dim + values
    return {
        f"{prefix}A_log": ("F32", (heads,)),
        f"{prefix}dt_bias": ("BF16", (heads,)),
        f"{prefix}norm.weight": ("F32", (d.linear_value_head_dim,)),
        **bf16(
            prefix,
            conv1d=(qkv, 1, d.linear_conv_kernel_dim),
            in_proj_qkv=(qkv, d.hidden_size),
            in_proj_z=(values, d.hidden_size),
            in_proj_a=(heads, d.hidden_size),
            in_proj_b=(heads, d.hidden_size),
            out_proj=(d.hidden_size, values),
        ),
    }


def gated_mlp(prefix: str, hidden: int, inner: int) -> Tensors:
    """One SwiGLU MLP: gate and up `[inner, hidden]`, down `[hidden, inner]`."""
    up, down = (inner, hidden), (hidden, inner)
    return bf16(prefix, gate_proj=up, up_proj=up, down_proj=down)


def fused_experts(prefix: str, d: Dims) -> Tensors:
    """Two 3-D tensors without `.weight`: `[E, 2I, H]` (gate rows, then up rows), `[E, H, I]`."""
    experts, hidden, inner = d.num_experts, d.hidden_size, d.moe_intermediate_size
    return {
        f"{prefix}gate_up_proj": ("BF16", (experts, 2 * inner, hidden)),
        f"{prefix}down_proj": ("BF16", (experts, hidden, inner)),
    }


def separate_experts(prefix: str, d: Dims) -> Tensors:
    """Three tensors per expert, as in quantised releases and in the mtp layer of Qwen3.5."""
    tensors: Tensors = {}
    for expert in range(d.num_experts):
        tensors |= gated_mlp(f"{prefix}{expert}.", d.hidden_size, d.moe_intermediate_size)
    return tensors


def moe(prefix: str, d: Dims, experts: Part = fused_experts) -> Tensors:
    """Router, routed experts and, where the family has one, the gated shared expert."""
    prefix += "mlp."
    tensors = bf16(prefix, gate=(d.num_experts, d.hidden_size)) | experts(f"{prefix}experts.", d)
    if inner := d.shared_expert_intermediate_size:
        tensors |= gated_mlp(f"{prefix}shared_expert.", d.hidden_size, inner)
        tensors |= bf16(prefix, shared_expert_gate=(1, d.hidden_size))
    return tensors


def decoder_layer(prefix: str, d: Dims, mixer: Part, mlp: Part) -> Tensors:
    """Two norms around a token mixer (attention or linear attention) and an MLP."""
    hidden = (d.hidden_size,)
    norms = bf16(prefix, input_layernorm=hidden, post_attention_layernorm=hidden)
    return norms | mixer(prefix, d) | mlp(prefix, d)


def language_model(prefix: str, d: Dims, mlp: Part = moe) -> Tensors:
    """Embedding, final norm and decoder layers; every `full_attention_interval`-th is attention."""
    tensors = bf16(prefix, embed_tokens=(d.vocab_size, d.hidden_size), norm=(d.hidden_size,))
    for layer in range(d.num_hidden_layers):
        mixer = linear_attention if (layer + 1) % d.full_attention_interval else attention
        tensors |= decoder_layer(f"{prefix}layers.{layer}.", d, mixer, mlp)
    return tensors


def head(d: Dims) -> Tensors:
    """The output head, a top-level name. Checkpoints with tied embeddings lack it."""
    return bf16("", lm_head=(d.vocab_size, d.hidden_size))


def mtp(d: Dims, mlp: Part) -> Tensors:
    """Multi-token prediction: one attention layer that borrows the model's embedding and head."""
    norm = (d.hidden_size,)
    tensors = bf16("mtp.", fc=(d.hidden_size, 2 * d.hidden_size), norm=norm)
    tensors |= bf16("mtp.", pre_fc_norm_embedding=norm, pre_fc_norm_hidden=norm)
    return tensors | decoder_layer("mtp.layers.0.", d, attention, mlp)


def visual(d: Dims) -> Tensors:
    """The vision tower; `blocks.N` and `deepstack_merger_list.N` are no decoder layers."""
    width, inner = d.vision_hidden_size, d.vision_intermediate_size
    merged = width * d.vision_spatial_merge_size**2
    patch = (d.vision_temporal_patch_size, d.vision_patch_size, d.vision_patch_size)
    block = {
        "norm1": (width,),
        "norm2": (width,),
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.linear_fc1": (inner, width),
        "mlp.linear_fc2": (width, inner),
    }
    mergers = {"merger": width}
    for n in range(len(d.vision_deepstack_visual_indexes)):
        mergers[f"deepstack_merger_list.{n}"] = merged
    modules: dict[str, tuple[int, ...]] = {}
    modules["patch_embed.proj"] = (width, d.vision_in_channels, *patch)
    for depth in range(d.vision_depth):
        modules |= {f"blocks.{depth}.{module}": shape for module, shape in block.items()}
    for merger, norm in mergers.items():
        modules[f"{merger}.norm"] = (norm,)
        modules[f"{merger}.linear_fc1"] = (merged, merged)
        modules[f"{merger}.linear_fc2"] = (d.hidden_size, merged)

    prefix = "model.visual."
    tensors = bf16(prefix, pos_embed=(d.vision_num_position_embeddings, width))
    for module, shape in modules.items():
        tensors[f"{prefix}{module}.weight"] = ("BF16", shape)
        tensors[f"{prefix}{module}.bias"] = ("BF16", shape[:1])
    return tensors


def checkpoint(d: Dims) -> Tensors:
    """All tensors of a Qwen3.5 MoE release: fused experts, but separate ones in the mtp layer."""

    def mtp_mlp(prefix: str, d: Dims) -> Tensors:
        return moe(prefix, d, separate_experts)

    return language_model(LANGUAGE_MODEL, d) | head(d) | mtp(d, mtp_mlp) | visual(d)


# --- config.json and the other small files --------------------------------------------------------


def config(d: Dims) -> dict[str, Any]:
    """config.json: text sizes in `text_config`, vision sizes in `vision_config`."""
    sizes = asdict(d)
    text = {k: v for k, v in sizes.items() if not k.startswith("vision_")}
    vision = {k.removeprefix("vision_"): v for k, v in sizes.items() if k.startswith("vision_")}
    frequencies = d.head_dim // 8  # rotary covers a quarter of the head, two dimensions each
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "image_token_id": d.vocab_size - 4,
        "video_token_id": d.vocab_size - 3,
        "vision_start_token_id": d.vocab_size - 2,
        "vision_end_token_id": d.vocab_size - 1,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            **text,
            "layer_types": [
                "linear_attention" if (n + 1) % d.full_attention_interval else "full_attention"
                for n in range(d.num_hidden_layers)
            ],
            "attention_bias": False,
            "dtype": "bfloat16",
            "eos_token_id": d.vocab_size - 5,
            "hidden_act": "silu",
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [(frequencies + n) // 3 for n in (2, 1, 0)],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
        },
        "vision_config": {
            "model_type": "qwen3_5_moe",
            **vision,
            "deepstack_visual_indexes": list(d.vision_deepstack_visual_indexes),
            "hidden_act": "gelu_pytorch_tanh",
            "out_hidden_size": d.hidden_size,
        },
    }


SIDE_FILES: dict[str, str] = {
    "generation_config.json": '{"do_sample": true, "temperature": 0.6, "top_p": 0.95}\n',
    "tokenizer.json": '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}\n',
    "tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": false}\n',
    "vocab.json": '{"!": 0, "\\u0120": 1}\n',
    "merges.txt": "#version: 0.2\n\u0120 \u0120\n",
    "chat_template.jinja": "{%- for message in messages %}{{ message.content }}{%- endfor %}\n",
    "preprocessor_config.json": '{"patch_size": 4, "merge_size": 2}\n',
    "video_preprocessor_config.json": '{"patch_size": 4, "fps": 2}\n',
    "LICENSE": "Apache License, Version 2.0\n",
    "README.md": "---\nlicense: apache-2.0\n---\n# A tiny checkpoint\n",
    ".gitattributes": "*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
}
"""What a release holds beside weights, index and config.json: file name -> text."""


def write_json(path: Path, value: object) -> None:
    """Write `value` the way the Hub's JSON files look."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_side_files(path: Path) -> None:
    """Write the `SIDE_FILES` into the directory `path`."""
    for name, text in SIDE_FILES.items():
        (path / name).write_text(text, encoding="utf-8")


# --- safetensors files ----------------------------------------------------------------------------


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; 4- and 6-bit elements are packed."""
    bits = BITS[dtype]
    for size in shape:
        bits *= size
    return bits // 8


def total_bytes(tensors: Tensors) -> int:
    """Bytes of all tensors: `total_size` of the index."""
    return sum(nbytes(dtype, shape) for dtype, shape in tensors.values())


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str] | None
) -> bytes:
    """The start of a safetensors file: u64 length, then JSON padded with spaces to 8 bytes.

    `tensors` maps names to (dtype, shape, bytes); the data follow in their order.
    Source: https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        begin, end = end, end + size
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def noise(seed: int, name: str, dtype: str, size: int) -> bytes:
    """Bytes that depend on seed and tensor name alone, so every sharding has the same tensors.

    As numbers they are finite and small, as weights are: floating-point ones get an exponent that
    leaves 2**-7 to 2**-3 (F8_E4M3: below 2), of either sign.
    """
    data = bytearray(random.Random(f"{seed} {name}").randbytes(size))
    if dtype in ("BF16", "F32"):  # the last byte: sign and most of the exponent
        width = BITS[dtype] // 8
        data[width - 1 :: width] = data[width - 1 :: width].translate(_SMALL)
    elif dtype == "F16":
        data[1::2] = data[1::2].translate(_SMALL_F16)
    elif dtype == "F8_E4M3":
        data = data.translate(_SMALL_F8)
    return bytes(data)


_SMALL = bytes(byte & 0x81 | 0x3C for byte in range(256))
_SMALL_F16 = bytes(byte & 0x87 | 0x20 for byte in range(256))
_SMALL_F8 = bytes(byte & 0xBF for byte in range(256))


def write_index(path: Path, files: Mapping[str, Iterable[str]], total_size: float) -> None:
    """Write `model.safetensors.index.json` for files (name -> tensor names) of directory `path`."""
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(path / "model.safetensors.index.json", index)


def write_shards(
    path: Path,
    tensors: Tensors,
    *,
    shards: int = 4,
    seed: int = 0,
    shard_name: str = SHARD_NAME,
    metadata: Mapping[str, str] | None = FORMAT,
    index: bool = True,
) -> dict[str, list[str]]:
    """Write `tensors` as noise into `shards` files of directory `path`, and (`index`) their index.

    The seed deals tensors to shards at random: real releases, too, spread a layer over shards.
    Within a file wide dtypes come first, as the safetensors library writes them.
    Returns file name -> tensor names in file order.
    """
    dealt = list(tensors)
    random.Random(seed).shuffle(dealt)
    files: dict[str, list[str]] = {}
    for shard in range(shards):
        names = sorted(dealt[shard::shards], key=lambda name: -BITS[tensors[name][0]])
        sized = {name: (*tensors[name], nbytes(*tensors[name])) for name in names}
        file = shard_name.format(shard + 1, shards)
        files[file] = names
        with open(path / file, "wb") as out:
            out.write(encode_header(sized, metadata))
            out.writelines(
                noise(seed, name, dtype, size) for name, (dtype, _, size) in sized.items()
            )
    if index:
        write_index(path, files, total_bytes(tensors))
    return files


def main() -> None:
    """Write the checkpoint into the directory named on the command line."""
    parser = argparse.ArgumentParser(description="Write a tiny Qwen3.5 MoE checkpoint.")
    parser.add_argument("dir", type=Path, help="directory to write, made if it is missing")
    path: Path = parser.parse_args().dir
    path.mkdir(parents=True, exist_ok=True)
    dims = Dims(num_experts=16, vocab_size=1024)
    tensors = checkpoint(dims)
    files = write_shards(path, tensors)
    write_json(path / "config.json", config(dims))
    write_side_files(path)
    size = total_bytes(tensors)
    print(f"{path}: {len(tensors)} tensors, {size:,} bytes in {len(files)} shards")


if __name__ == "__main__":
    main()
