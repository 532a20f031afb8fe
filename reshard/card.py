"""The model card of a repository of stage bundles, and what the source's card says of its license."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

from reshard.bundle import stage_directory
from reshard.launch import node_commands
from reshard.manifest import LicenseFacts, Manifest, StageRecord
from reshard.placement import ENGINES
from reshard.reference import HubReference
from reshard.units import size, span
from reshard.version import __version__

CARD_NAME = "README.md"
MAX_CARD = 64_000
"""How much of a source's card is read: its metadata, which stand at the beginning."""

MAX_OWN_CARD = 10_000_000
"""No card of ours is larger."""

_METADATA = re.compile(r"---\r?\n(.*?)\r?\n---\r?\n", re.DOTALL)
_SEAL = re.compile(
    r"\n<!-- reshard push keeps this page up to date until it is edited: (\w+) -->\n"
)


def read_license(card: str) -> LicenseFacts | None:
    """The license fields of a model card's metadata; None where it has none that can be read."""
    import yaml  # here, because planning and most splits do without

    match = _METADATA.match(card)
    if match is None:
        return None
    try:  # BaseLoader makes text, lists and maps only, whatever the tags say
        metadata = yaml.load(match[1], Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return None
    if not isinstance(metadata, dict):
        return None
    names = ("license", "license_name", "license_link")
    values = {name: metadata.get(name) for name in names}
    found = {name: value if _is_plain(value) else None for name, value in values.items()}
    return LicenseFacts(**found) if any(found.values()) else None


def is_ours(card: str) -> bool:
    """Whether a card was written by `model_card` and not edited since."""
    seals = list(_SEAL.finditer(card))
    return len(seals) == 1 and card == _sealed(card[: seals[0].start()])


def model_card(manifest: Manifest, reference: HubReference) -> str:
    """The card of a repository with the stages present in `manifest`."""
    import yaml

    metadata = yaml.safe_dump(_metadata(manifest), sort_keys=False, allow_unicode=True)
    engine = ENGINES[manifest.engine.name]
    pp_size = manifest.pp_size
    rows = "\n".join(_row(stage, manifest) for stage in manifest.stages)
    commands = node_commands(manifest, str(reference))
    download = ["hf", "download", reference.repo]
    download += ["--revision", reference.revision] if reference.revision is not None else []
    download += ["--include", f"{stage_directory(manifest.present[0], pp_size)}/*"]
    nodes = "\n\n".join(
        f"# node {command.node}\n{command.pull}\n{command.launch}" for command in commands
    )
    return _sealed(
        f"""---
{metadata}---

# {reference.repo.rpartition("/")[2]}

The weights of {_base(manifest)}, unchanged, sorted into {pp_size} bundles for pipeline
parallelism: one for each rank of {engine.name}. They are the same tensors, byte for byte; nothing was trained,
quantised or converted. A node needs its own stage only.

| stage | layers | also | size | in this repository |
|---:|---|---|---:|---|
{rows}

Made by [reshard](https://pypi.org/project/reshard/) {__version__}, for {engine.name} {engine.version};
other engines may need other copies on a stage.

## Use

One stage on each of {pp_size} nodes; `HEAD` is the address of node 0, the path the same on every node:

```sh
pip install reshard

{nodes}
```

`{shlex.join(download)}` fetches a stage without reshard; it is an ordinary
model directory. Give engines such a directory, not the name of this repository, whose weights lie in
directories where they do not look. transformers loads the repository as it is, once all stages are in it.

The license is that of the base model.
"""
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= 1000


def _metadata(manifest: Manifest) -> dict[str, Any]:
    source = manifest.source
    fields: Mapping[str, str | None] = {
        "base_model": source.repo if _is_plain(source.repo) else None,
        "library_name": "transformers",
        "license": source.license.license if source.license else None,
        "license_name": source.license.license_name if source.license else None,
        "license_link": source.license.license_link if source.license else None,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    return {**known, "tags": ["reshard", "pipeline-parallel", manifest.engine.name]}


def _base(manifest: Manifest) -> str:
    source = manifest.source
    if source.repo is None:
        return f"a {manifest.model.model_type} checkpoint"
    return f"[{source.repo}](https://huggingface.co/{source.repo}/tree/{source.commit}) at commit `{source.commit}`"


def _row(stage: StageRecord, manifest: Manifest) -> str:
    others = dict.fromkeys(
        file.component.kind for file in stage.files if file.component.kind != "layer"
    )
    nbytes = sum(file.tensor_bytes for file in stage.files)
    here = "yes" if stage.stage in manifest.present else "not yet"
    layers = span(stage.start_layer, stage.end_layer - 1)
    return f"| {stage.stage} | {layers} | {', '.join(others)} | {size(nbytes)} | {here} |"


def _sealed(text: str) -> str:
    seal = hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]
    return f"{text}\n<!-- reshard push keeps this page up to date until it is edited: {seal} -->\n"
