"""The usual way to split a checkpoint, which `split.py` compares with: load tensors, save them.

`python load_and_save.py SOURCE OUT STAGES` writes one file per stage, durably. The stages hold as
many layers each; what belongs to no layer goes to the last stage.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def load_and_save(source: Path, out: Path, stages: int) -> None:
    """Write `out/stage-N/model.safetensors` for every stage."""
    index = json.loads((source / "model.safetensors.index.json").read_text("utf-8"))
    layer_of = {}
    for name in index["weight_map"]:
        layer = re.search(r"language_model\.layers\.(\d+)\.", name)
        layer_of[name] = int(layer[1]) if layer else -1
    layers = max(layer_of.values()) + 1
    plan: list[dict[str, list[str]]] = [defaultdict(list) for _ in range(stages)]
    for name, file in index["weight_map"].items():
        stage = layer_of[name] * stages // layers  # -1: the last one
        plan[stage][file].append(name)
    for stage, files in enumerate(plan):
        tensors: dict[str, torch.Tensor] = {}
        for file, names in files.items():
            with safe_open(source / file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in names}
        path = out / f"stage-{stage}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        save_file(tensors, path, metadata={"format": "pt"})
        with open(path, "rb") as file_:
            os.fsync(file_.fileno())


if __name__ == "__main__":
    load_and_save(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
