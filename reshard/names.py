"""What a tensor's name says: which component it belongs to, which layer, which expert."""

from __future__ import annotations

import re
from typing import NamedTuple

from reshard.config import ModelConfig

KINDS = ("visual", "embed", "layer", "head", "mtp")
"""The kinds of component, in the order in which a stage lists them."""

_LAYER_ID = re.compile(r"layers\.(\d+)\.")
_LAYER_NUMBER = re.compile(r"layers\.(0|[1-9][0-9]{0,4})\.")
_EXPERT = re.compile(
    r"(?P<module>.*\.experts)\.(?P<expert>0|[1-9][0-9]{0,4})\.(?P<proj>gate|up|down)_proj\.(?P<suffix>.+)",
    re.DOTALL,
)
_FUSED_EXPERTS = re.compile(
    r"(?P<module>.*\.experts)\.(?P<proj>gate_up|down)_proj(?P<suffix>.*)", re.DOTALL
)
_DIGITS = re.compile(r"([0-9]+)")


def get_layer_id(weight_name: str) -> int | None:
    """The number in the first `layers.<n>.` of a name, or None.

    The semantics of SGLang's function of the same name (`sglang/srt/layers/utils/common.py`): the
    search is not anchored, so `mtp.layers.0.fc.weight` gives 0. reshard therefore asks it only
    about language-model names.
    """
    match = _LAYER_ID.search(weight_name)
    return int(match.group(1)) if match else None


class Component(NamedTuple):
    """One decoder layer, or one of the parts around the decoder. Written to files of its own."""

    kind: str
    layer_id: int | None = None

    @property
    def stem(self) -> str:
        """The start of its file names: `model-layer-00012`, `model-visual`."""
        return f"model-{self.kind}" if self.layer_id is None else f"model-layer-{self.layer_id:05d}"


def component_of(name: str, config: ModelConfig) -> Component | None:
    """The component that owns the tensor `name`, or None if the name is not known.

    Suffixes are opaque (scales, packed forms). A layer number is taken only right after the
    language model's prefix, in plain decimal digits and below `num_hidden_layers`.
    """
    family = config.family
    prefix = family.language_prefix
    if family.has_visual and name.startswith("model.visual."):
        return Component("visual")
    if name.startswith(prefix):
        rest = name[len(prefix) :]
        if match := _LAYER_NUMBER.match(rest):
            layer_id = get_layer_id(name)
            known = layer_id == int(match.group(1)) and layer_id < config.num_hidden_layers
            return Component("layer", layer_id) if known else None
        if rest.startswith("embed_tokens."):
            return Component("embed")
        return Component("head") if rest.startswith("norm.") else None
    if name.startswith("lm_head."):
        return Component("head")
    if family.has_mtp and name.startswith("mtp."):
        return Component("mtp")
    return None


class ExpertName(NamedTuple):
    """A tensor of a single expert: `<module>.<expert>.<proj>_proj.<suffix>`."""

    module: str
    expert: int
    proj: str
    suffix: str


def parse_expert(name: str) -> ExpertName | None:
    """`....mlp.experts.7.gate_proj.weight` -> (`....mlp.experts`, 7, `gate`, `weight`)."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    return ExpertName(match["module"], int(match["expert"]), match["proj"], match["suffix"])


class FusedName(NamedTuple):
    """A tensor of all experts: `<module>.<proj>_proj<suffix>`; the weight has no suffix."""

    module: str
    proj: str
    suffix: str


def parse_fused(name: str) -> FusedName | None:
    """`....mlp.experts.gate_up_proj` -> (`....mlp.experts`, `gate_up`, ``)."""
    match = _FUSED_EXPERTS.fullmatch(name)
    return FusedName(match["module"], match["proj"], match["suffix"]) if match else None


def natural_key(name: str) -> tuple[object, ...]:
    """Sorts names with numbers by value, never converting a number.

    Split at runs of ASCII digits; text compares by code points, numbers by their length without
    leading zeros and then by their digits; the name itself breaks ties.
    """
    parts = _DIGITS.split(name)
    key: list[object] = list(parts)
    for i in range(1, len(parts), 2):
        digits = parts[i].lstrip("0")
        key[i] = (len(digits), digits)
    return (key, name.encode("utf-8", "surrogatepass"))


def component_key(component: Component) -> str:
    """The name under which JSON documents count a component: all layers together as `layers`."""
    return "layers" if component.kind == "layer" else component.kind


COMPONENT_KEYS = tuple(component_key(Component(kind)) for kind in KINDS)
