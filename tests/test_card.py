"""The model card: what it says, whose it is, and what is read of a source's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from reshard import build_plan, open_checkpoint, split
from reshard.card import is_ours, model_card, read_license
from reshard.manifest import LicenseFacts, Manifest
from reshard.reference import HubReference
from tests.checkpoints import build
from tests.conftest import Online, tree
from tests.hub_server import HubServer

REPO = "org/set"
MODEL = "qwen/Model-397B"
SOURCE_CARD = b"""---
library_name: transformers
license: other
license_name: qwen-research
license_link: https://huggingface.co/qwen/Model-397B/blob/main/LICENSE
pipeline_tag: text-generation
---
# Model
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints") / "source", hidden_size=64)


@pytest.fixture(scope="module")
def manifest(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    out = tmp_path_factory.mktemp("sets") / "out"
    return split(build_plan(open_checkpoint(source), 4, engine="vllm"), out).manifest


def metadata(card: str) -> dict[str, Any]:
    """The front matter, as the Hub reads it."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match is not None
    fields = yaml.safe_load(match[1])
    assert isinstance(fields, dict)
    return fields


# --- what it says ---------------------------------------------------------------------------------


def test_card_of_a_set_made_from_a_repository(
    hub: HubServer, online: Online, source: Path, tmp_path: Path
) -> None:
    commit = hub.create(MODEL, {**tree(source), "README.md": SOURCE_CARD})
    out = tmp_path / "out"
    assert online("split", MODEL, out, "--pp-size", 4).code == 0
    assert online("push", out, REPO, "--stage", "1,2").code == 0
    first = hub.files(REPO)["README.md"].decode()
    assert online("push", out, REPO).code == 0
    files = hub.files(REPO)
    card = files["README.md"].decode()

    assert metadata(card) == {
        "base_model": MODEL,
        "library_name": "transformers",
        "license": "other",
        "license_name": "qwen-research",
        "license_link": f"https://huggingface.co/{MODEL}/blob/main/LICENSE",
        "tags": ["reshard", "pipeline-parallel", "sglang"],
    }
    assert files["LICENSE"] == (source / "LICENSE").read_bytes()
    assert f"[{MODEL}](https://huggingface.co/{MODEL}/tree/{commit})" in card
    assert "4 bundles" in card
    assert f"reshard pull {REPO} /models/Model-397B --stage 3\n" in card
    assert "python -m sglang.launch_server --model-path /models/Model-397B --pp-size 4" in card
    assert is_ours(card) and is_ours(first)

    assert re.findall(r"^\| (\d) \| (\d-\d) \|.* (yes|not yet) \|$", first, re.MULTILINE) == [
        ("0", "0-1", "not yet"),
        ("1", "2-3", "yes"),
        ("2", "4-5", "yes"),
        ("3", "6-7", "not yet"),
    ]
    assert re.findall(r"--stage (\d)\n", first) == ["1", "2"]
    assert "not yet" not in card


def test_stages_and_their_sizes(manifest: Manifest) -> None:
    card = model_card(manifest, HubReference(REPO, "pp4"))
    rows = re.findall(r"^\| (\d) \|.*\| ([^|]+) kB \| yes \|$", card, re.MULTILINE)
    for stage, (number, kilobytes) in zip(manifest.stages, rows, strict=True):
        assert int(number) == stage.stage
        nbytes = sum(file.tensor_bytes for file in stage.files)
        assert abs(float(kilobytes) * 1000 - nbytes) <= 500
    assert "| 3 | 6-7 | embed, head, mtp |" in card or "| 3 | 6-7 | head, mtp |" in card
    assert metadata(card)["tags"] == ["reshard", "pipeline-parallel", "vllm"]
    assert f"reshard pull {REPO}@pp4 /models/source --stage 0\n" in card
    assert "VLLM_PP_LAYER_PARTITION=2,2,2,2 vllm serve /models/source" in card


def test_commands_name_the_revision_and_stages_that_are_there(manifest: Manifest) -> None:
    """Also the one for people without reshard."""
    some = manifest.seen_from((2,), {}, root=False)
    card = model_card(some, HubReference(REPO, "pp4"))
    [download] = re.findall(r"`(hf download [^`]*)`", card)
    assert "--revision pp4" in download
    assert "stage-02-of-04/*" in download


texts = st.text(min_size=1).filter(str.isprintable)  # as `read_license` leaves them
licenses = st.builds(LicenseFacts, *(st.none() | texts for _ in range(3)))


@example(license=LicenseFacts("a: --- #b", "yes", "3: [x"), repo=None)
@given(license=licenses, repo=st.none() | texts)
def test_front_matter_is_valid_whatever_the_source_says(
    manifest: Manifest, license: LicenseFacts, repo: str | None
) -> None:
    facts = replace(manifest.source, license=license, repo=repo)
    card = model_card(replace(manifest, source=facts), HubReference(REPO))
    assert card.startswith("---\n")
    fields = next(yaml.safe_load_all(card.split("\n---\n")[0]))
    expected = {
        "base_model": repo,
        "license": license.license,
        "license_name": license.license_name,
        "license_link": license.license_link,
    }
    found = {name: fields.get(name) for name in expected}
    assert found == expected
    assert is_ours(card)


# --- whose it is ----------------------------------------------------------------------------------


@given(data=st.data())
def test_card_is_not_ours_after_any_edit(manifest: Manifest, data: st.DataObject) -> None:
    card = model_card(manifest, HubReference(REPO))
    begin = data.draw(st.integers(0, len(card)))
    end = begin + data.draw(st.integers(0, 5) | st.integers(0, len(card)))
    edited = card[:begin] + data.draw(st.text() | st.sampled_from((card, card[-99:]))) + card[end:]
    assert is_ours(edited) == (edited == card)


@pytest.mark.parametrize(
    "old, new", [("\n", "\r\n"), ("\n", ""), ("sglang", "SGLang"), (" ", "  ")]
)
def test_card_is_not_ours_after_replacements(manifest: Manifest, old: str, new: str) -> None:
    card = model_card(
        replace(manifest, engine=replace(manifest.engine, name="sglang")), HubReference(REPO)
    )
    assert is_ours(card)
    assert not is_ours(card.replace(old, new))


@given(st.text())
def test_texts_of_others_are_not_ours(text: str) -> None:
    assert not is_ours(text)


@pytest.mark.parametrize("edit", [b"\nTrained on my own data.\n", None])
def test_card_of_a_person_stays(
    hub: HubServer, online: Online, source: Path, tmp_path: Path, edit: bytes | None
) -> None:
    out = tmp_path / "out"
    split(build_plan(open_checkpoint(source), 2), out)
    if edit is None:
        mine = b"# Mine\n\xff"
        hub.create(REPO, {"README.md": mine})
    else:
        assert online("push", out, REPO, "--stage", "0").code == 0
        mine = hub.files(REPO)["README.md"] + edit
        hub.commit(REPO, {"README.md": mine})
    result = online("push", out, REPO, "--json", "--quiet")
    assert hub.files(REPO)["README.md"] == mine
    assert json.loads(hub.files(REPO)["reshard.json"])["present"] == [0, 1]
    [note] = json.loads(result.out)["notes"]
    assert "README.md" in note and "left as it is" in note
    hub.forget()
    again = online("push", out, REPO)
    assert (again.code, "holds all of it already" in again.out) == (0, True)
    assert "note: README.md in the repository" in again.err


# --- what is read of a source's -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "facts"),
    [
        (SOURCE_CARD.decode(), LicenseFacts("other", "qwen-research", f"https://huggingface.co/{MODEL}/blob/main/LICENSE")),
        ("---\nlicense: apache-2.0\n---\n", LicenseFacts("apache-2.0", None, None)),
        ("---\r\nlicense: mit\r\n---\r\ntext", LicenseFacts("mit", None, None)),
        ("---\nlicense: [mit, apache-2.0]\nlicense_name: x\n---\n", LicenseFacts(None, "x", None)),
        ("---\nlicense: 3\n---\n", LicenseFacts("3", None, None)),
        ("---\nlicense:\n---\n", None),
        ("---\ntags: [a]\n---\n", None),
        ("---\n- license: mit\n---\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\nlicense: mit\n", None),
        ("license: mit\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_license(card: str, facts: LicenseFacts | None) -> None:
    assert read_license(card) == facts


HOSTILE = [
    "license: !!int ''",
    "license: !!bool maybe",
    "license: !!timestamp soon",
    "license: !!float ''",
    "license: !!binary '*'",
    "license: !!python/object:os.system {}",
    "license: 2024-99-99",
    "license: !!set {a, b}",
    "? {a: b}\n: c",
    "? [a]\n: c",
    "a: &a [*a]\nlicense: *a",
    "license: *unknown",
    "license: " + "9" * 5000,
    "a: " + "[" * 5000,
    "<<: 3\nlicense: mit",
    "<<: [3]",
    "license: mit\nlicense: mit",
    "\tlicense: mit",
    "%YAML 9.9\n--- a",
    "license: \0",
    "license: \x85",
    "!!omap [a]",
    "!!pairs {a: b}",
    "license: !!str {a: b}",
    "!!str license: !!null x",
    "=: a\nlicense: =",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_metadata(text: str) -> None:
    """They are read as the text that they are, or not at all."""
    found = read_license(f"---\n{text}\n---\n")
    assert found is None or (found.license or "").isprintable()


@pytest.mark.parametrize("text", [r'"\uD800"', r'"\UFFFFFFFF"', r'"\x00\x1b[31m"'])
def test_license_can_be_written_down(text: str) -> None:
    """In UTF-8, as manifests and cards are."""
    found = read_license(f"---\nlicense: {text}\n---\n")
    if found is not None and found.license is not None:
        found.license.encode("utf-8")


pieces = st.sampled_from(
    ["license", ": ", "\n", "- ", "!!int ", "!!bool ", "''", "&a ", "*a", "{", "}", "[", "]", "? ", "<<"]
)  # fmt: skip


@given(st.text() | st.lists(pieces, max_size=12).map("".join))
@example("license: [mit\n---\n---")
def test_no_metadata_raise(text: str) -> None:
    read_license(f"---\n{text}\n---\n")
    read_license(text)
