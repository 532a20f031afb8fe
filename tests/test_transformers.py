"""transformers writes the checkpoint and reads the results: an independent writer and reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from reshard import build_plan, open_checkpoint, split, verify
from tests.checkpoints import build, read_dir
from tests.conftest import Cli

CLASSES: dict[str, type[PreTrainedModel]] = {
    "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("original_format", [False, True])
def test_saved_checkpoint_splits_merges_and_loads(
    tmp_path: Path, cli: Cli, family: str, tied: bool, original_format: bool
) -> None:
    build(tmp_path / "config", family, tied=tied, mtp=None)
    torch.manual_seed(0)
    config: Any = AutoConfig.from_pretrained(tmp_path / "config")
    model: Any = CLASSES[family]._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    source = tmp_path / "source"
    model.save_pretrained(source, max_shard_size="100KB", save_original_format=original_format)
    engine = "vllm" if tied and family == "qwen3_vl_moe" else "sglang"
    out = tmp_path / "out"
    split(build_plan(open_checkpoint(source), 2, engine=engine), out)
    assert verify(out, source=open_checkpoint(source)).ok
    assert cli("merge", out, tmp_path / "merged").code == 0
    assert read_dir(tmp_path / "merged") == read_dir(source)
    expected = model.state_dict()
    for directory in (tmp_path / "merged", out):
        loaded, info = AutoModelForImageTextToText.from_pretrained(
            directory, output_loading_info=True, dtype="auto"
        )
        assert not any(info.values()), json.dumps(info, default=str)
        found = loaded.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
