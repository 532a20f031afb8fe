"""What people see in a terminal: tables on stdout, progress and messages on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reshard.errors import printable, quoted, say
from reshard.launch import NodeCommands
from reshard.units import counted, size, span

if TYPE_CHECKING:
    from tqdm import tqdm

_BAR_WIDTH = 24
_COMPONENTS = {
    "visual": ("▒", "v", "magenta"),
    "embed": ("░", "e", "cyan"),
    "layers": ("█", "=", "blue"),
    "head": ("▓", "h", "green"),
    "mtp": ("▞", "m", "yellow"),
}


class Display:
    """Writes results to stdout and everything else to stderr; `quiet` drops all but errors."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        if not self._out.is_terminal:
            self._out.width = 200
        self._quiet = quiet

    def line(self, text: str = "") -> None:
        if not self._quiet:
            self._out.print(Text(printable(text)))

    def messages(self, warnings: Sequence[str], notes: Sequence[str]) -> None:
        for kind, texts in (("warning", warnings), ("note", notes)):
            for text in texts if not self._quiet else ():
                say(f"{kind}: {text}")

    def plan(self, document: Mapping[str, Any], title: str) -> None:
        """The stages of a set: a row for each, with a bar of its bytes by component."""
        if self._quiet:
            return
        rows = [_stage_row(stage, document["replicated"]) for stage in document["stages"]]
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        used = 0
        for number, (name, justify) in enumerate(_STAGE_COLUMNS):
            table.add_column(name, justify=justify, no_wrap=True)
            used += 2 + max(len(name), *(len(row[number]) for row in rows))
        bar_width = min(_BAR_WIDTH, self._out.width - used)
        largest = max(1, *(stage["bytes"] for stage in document["stages"]))
        if bar_width >= _BAR_WIDTH // 2:
            table.add_column("by component")
            for row, stage in zip(rows, document["stages"], strict=True):
                table.add_row(*row, self._bar(stage["components"], largest, bar_width))
        else:
            for row in rows:
                table.add_row(*row)
        self.line(title)
        self._table(table)
        for placement in document["placement"]:
            self._out.print(self._legend(placement))
        for excluded in document["excluded"]:
            name = quoted(excluded["name"])
            tensors = counted(excluded["tensors"], "tensor")
            self.line(f"excluded: {name}, {tensors}, {size(excluded['bytes'])}")

    def inspection(self, document: Mapping[str, Any]) -> None:
        """The facts of a checkpoint, and what its components take."""
        table = Table(box=None, pad_edge=False, show_header=False)
        for name in _FACTS:
            if document[name] is not None or name not in _ORIGIN:
                shown = Text(_shown(document[name]))
                table.add_row(Text(name.replace("_", " "), style="bold"), shown)
        for name, fact in (document["set"] or {}).items():
            table.add_row(Text(name.replace("_", " "), style="bold"), Text(_shown(fact)))
        for name, part in (*document["components"].items(), ("total", document)):
            text = f"{counted(part['tensors'], 'tensor')}, {size(part['bytes'])}"
            table.add_row(Text(name, style="bold"), Text(text))
        self._table(table)
        if "hashes" in document:
            hashes = document["hashes"]
            for problem in hashes["problems"]:
                self.line(f"{problem['file']}: {problem['problem']}")
            good = hashes["checked"] - len(hashes["problems"])
            self.line(f"hashes: {good} of {hashes['checked']} files as published")
            if hashes["unknown"]:
                self.line(f"hashes: no checksum on record for {hashes['unknown']} files")

    def forward(self, document: Mapping[str, Any]) -> None:
        """How fast the layers of a stage ran, a row for each."""
        own = [layer["layer"] for layer in document["layers"]]
        self.line(
            f"stage {document['stage']} of {document['pp_size']}, {document['model_type']}, "
            f"{counted(len(own), 'layer')}: {counted(document['tokens'], 'token')}, "
            f"{document['dtype']}, on {document['device']}, torch {document['torch']}"
        )
        if document["device"] == "cpu":
            self.line("it ran on the CPU: this says nothing about a GPU")
        rate, flop = document["bytes_per_second"], document["flop_per_second"]
        self.line(f"measured here: copy {size(rate)}/s, matrix product {flop / 1e12:.3g} TFLOP/s")
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in _FORWARD_COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for layer in document["layers"]:
            error = "-" if layer["error"] is None else f"{layer['error']:.1e}"
            table.add_row(
                str(layer["layer"]),
                layer["backend"],
                f"{layer['distinct_experts']:,}",
                f"{layer['seconds'] * 1000:.3f} ms",
                size(layer["bytes"]),
                f"{layer['roofline']:.0%}, {layer['bound']}",
                error,
            )
        self._table(table)
        for layer in document["layers"]:
            if not layer["ok"]:
                error = "no number" if layer["error"] is None else f"{layer['error']:.1e}"
                limit = f"{layer['error_limit']:.1e}"
                self.line(
                    f"layer {layer['layer']} is wrong: {error} from the reference, {limit} allowed"
                )

    def launch(self, commands: Sequence[NodeCommands], engine: str) -> None:
        """What to run next, node by node."""
        self.line(f"next, for {engine}: give each node its stages, then start the engine there")
        self.line("(HEAD is the address of node 0, the path /models/... yours to choose):")
        for command in commands:
            self.line(f"  node {command.node}: {command.pull}")
            self.line(f"  {' ' * len(f'node {command.node}:')} {command.launch}")

    def progress(self) -> Bars:
        return Bars(quiet=self._quiet)

    def _table(self, table: Table) -> None:
        """Print a table whole, however narrow the screen, without blanks at the ends of lines."""
        width, self._out.width = self._out.width, 10_000
        with self._out.capture() as capture:
            self._out.print(table)
        self._out.width = width
        for line in capture.get().splitlines():
            print(line.rstrip())

    def _bar(self, components: Mapping[str, int], largest: int, bar_width: int) -> Text:
        """`components` drawn to the scale on which `largest` fills the bar."""
        bar = Text()
        total = 0
        for name, (block, letter, style) in _COMPONENTS.items():
            before = round(total / largest * bar_width)
            total += components.get(name, 0)
            width = round(total / largest * bar_width) - before
            bar.append((block if self._draws_blocks() else letter) * width, style=style)
        return bar

    def _legend(self, placement: Mapping[str, Any]) -> Text:
        """`▞ mtp: 785 tensors, 1.69 GB -> stage 3`"""
        block, letter, style = _COMPONENTS[placement["component"]]
        stages = placement["stages"]
        where = ", ".join(map(str, stages))
        if len(stages) > 2 and stages == list(range(stages[0], stages[-1] + 1)):
            where = f"{stages[0]}-{stages[-1]}"
        legend = Text(block if self._draws_blocks() else letter, style=style)
        what = f"{counted(placement['tensors'], 'tensor')}, {size(placement['bytes'])}"
        plural = "s" if len(stages) > 1 else ""
        legend.append(f" {placement['component']}: {what} -> stage{plural} {where}", style="none")
        return legend

    def _draws_blocks(self) -> bool:
        return self._out.encoding.lower().startswith("utf")


_FORWARD_COLUMNS = ("layer", "backend", "experts", "time", "bytes", "roofline", "error")

_STAGE_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("stage", "right"),
    ("layers", "right"),
    ("bytes", "right"),
    ("files", "right"),
    ("tensors", "right"),
    ("replicas", "left"),
)


def _stage_row(stage: Mapping[str, Any], replicated: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of a stage, for `_STAGE_COLUMNS`."""
    replicas = [r["component"] for r in replicated if r["stage"] == stage["stage"]]
    return [
        str(stage["stage"]),
        span(stage["start_layer"], stage["end_layer"] - 1),
        size(stage["bytes"]),
        str(len(stage["files"])),
        f"{stage['tensors']:,}",
        ", ".join(replicas) or "-",
    ]


_ORIGIN = ("repo", "commit")
_FACTS = (
    *_ORIGIN,
    "model_type",
    "num_hidden_layers",
    "num_experts",
    "expert_layout",
    "mtp_expert_layout",
    "quant_method",
    "tied",
)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else quoted(str(value))


class Bars:
    """Progress on stderr: a bar with rate and time left on a terminal, else a line for each file."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._lock = Lock()
        self._bar: tqdm[Any] | None = None

    def start(self, label: str, total_bytes: int) -> None:
        self.close()
        if self._terminal and not self._quiet and total_bytes:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_bytes, desc=label, unit="B", unit_scale=True, dynamic_ncols=True
            )

    def advance(self, nbytes: int) -> None:
        if self._bar is not None:
            with self._lock:
                self._bar.update(nbytes)

    def finish_file(self, path: str, how: str) -> None:
        if not self._terminal and not self._quiet:
            with self._lock, suppress(BrokenPipeError):  # nobody listens: no reason to stop
                print(f"{how} {quoted(path)}", file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
