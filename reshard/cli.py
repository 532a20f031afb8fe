"""The command line. Results go to stdout, progress and messages to stderr."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from reshard.errors import Interrupted, ReshardError, UsageError, quoted, say

if TYPE_CHECKING:  # the rest is imported where it is used: --help is quick
    from reshard.display import Bars, Display
    from reshard.finish import Outcome
    from reshard.plan import ReshardPlan
    from reshard.push import Pushed

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reshard Qwen3.5 / Qwen3-VL MoE checkpoints into per-pipeline-stage bundles.",
    epilog="For example: reshard split MODEL OUT --pp-size 4 --engine sglang",
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A checkpoint or a set: its directory, or org/name[@revision] on the Hub.",
    ),
]
Set = Annotated[
    str,
    typer.Argument(metavar="OUT", help="Output of split or pull, or one of its stage directories."),
]
PpSize = Annotated[
    int, typer.Option("--pp-size", metavar="N", min=1, help="Number of pipeline stages.")
]
EngineName = Annotated[
    str, typer.Option("--engine", metavar="sglang|vllm", help="Engine that will serve the stages.")
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", metavar="A,B,...", help="Layers per stage, such as 23,24,24,23."),
]
Balance = Annotated[
    bool, typer.Option("--balance", help="Make the largest stage as small as possible.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="mtp|visual", help="Leave this out. Repeatable."),
]
Replicate = Annotated[
    list[str] | None,
    typer.Option(
        "--replicate", metavar="visual|embed|head", help="Put this on every stage. Repeatable."
    ),
]
IncludeFile = Annotated[
    list[str] | None,
    typer.Option(
        "--include-file", metavar="FILE", help="Take what is new from a file beside the index."
    ),
]
IgnoreFile = Annotated[
    list[str] | None,
    typer.Option("--ignore-file", metavar="FILE", help="Leave a file beside the index alone."),
]
Stages = Annotated[
    list[str] | None,
    typer.Option(
        "--stage", metavar="K", help="Write these stages only: 2, 0-3, 0,1 or all. Repeatable."
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", metavar="M", min=1, help="Nodes to launch. Default: one per stage."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", metavar="N", min=1, help="Files at a time. Default: the cores, up to 8."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="Print nothing but errors.", callback=lambda on: _be_quiet(on)),
]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from reshard.version import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def plan(
    source: Source,
    pp_size: PpSize,
    engine: EngineName = "sglang",
    layers: Layers = None,
    balance: Balance = False,
    exclude: Exclude = None,
    replicate: Replicate = None,
    include_file: IncludeFile = None,
    ignore_file: IgnoreFile = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", metavar="M", min=1, help="Show what each of M nodes would hold."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each stage would hold, reading headers only."""
    from reshard.describe import node_documents, plan_document

    made = _build_plan(
        source, pp_size, engine, layers, balance, exclude, replicate, include_file, ignore_file
    )
    document = plan_document(made)
    if nodes is not None:
        document["nodes"] = node_documents(made, nodes)
    if as_json:
        _print_json(document)
        return
    from reshard.display import Display
    from reshard.units import size

    display = Display()
    display.plan(document, _title(document, f"plan of {made.checkpoint.source.name}"))
    for node in document.get("nodes", []):
        stages = ", ".join(map(str, node["stages"]))
        display.line(f"node {node['node']}: stages {stages}, {size(node['bytes'])}")
    display.messages(made.warnings, made.notes)


@app.command()
def split(
    source: Source,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Directory to write; new, or to be continued.")
    ],
    pp_size: PpSize,
    engine: EngineName = "sglang",
    layers: Layers = None,
    balance: Balance = False,
    exclude: Exclude = None,
    replicate: Replicate = None,
    include_file: IncludeFile = None,
    ignore_file: IgnoreFile = None,
    nodes: Nodes = None,
    stage: Stages = None,
    jobs: Jobs = None,
    no_checksum: Annotated[
        bool, typer.Option("--no-checksum", help="Do not record sha256 of the files.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Write the stage bundles of a checkpoint or of another set."""
    from reshard.describe import outcome_document
    from reshard.display import Display
    from reshard.launch import node_commands, share_stages
    from reshard.partition import parse_stages
    from reshard.split import split as split_plan

    made = _build_plan(
        source, pp_size, engine, layers, balance, exclude, replicate, include_file, ignore_file
    )
    share_stages(pp_size, nodes)
    stages = parse_stages(stage, pp_size) if stage else None
    display = Display(quiet=quiet)
    display.messages(made.warnings, made.notes)
    with _working(display) as bars:
        outcome = split_plan(
            made,
            _directory(out),
            stages=stages,
            jobs=jobs,
            checksums=not no_checksum,
            progress=bars,
        )
    origin = made.checkpoint.source.origin
    document = outcome_document(outcome, origin, made.warnings, made.notes)
    commands = node_commands(outcome.manifest, str(Path(out).absolute()), nodes)
    if as_json:
        document["launch"] = [command._asdict() for command in commands]
        _print_json(document)
    else:
        display.plan(document, _title(document, quoted(out)))
        display.line(_counts(document, out))
        display.launch(commands, outcome.manifest.engine.name)
    files = outcome.manifest.files().values()
    if not no_checksum and any(file.sha256 is None for file in files):
        cure = f"reshard verify {shlex.quote(out)} --write-checksums"
        display.messages((), (f"files without a checksum are there; to add them: {cure}",))


@app.command()
def verify(
    out: Set,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="SOURCE", help="Compare every tensor with this checkpoint."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="sglang|vllm", help="Check that the placement serves this engine."
        ),
    ] = None,
    write_checksums: Annotated[
        bool, typer.Option("--write-checksums", help="Record checksums where they are missing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that a set is whole: structure, sizes and hashes."""
    from reshard.checkpoint import open_checkpoint
    from reshard.display import Display
    from reshard.units import counted, size
    from reshard.verify import verify as verify_set

    display = Display()
    original = open_checkpoint(source) if source is not None else None
    with _working(display, writes=False) as bars:
        report = verify_set(
            _directory(out),
            source=original,
            engine=engine.lower() if engine else None,
            write_checksums=write_checksums,
            progress=bars,
        )
    if as_json:
        _print_json(report.document())
    else:
        for problem in report.problems:
            display.line(f"{quoted(problem.file)}: {problem.problem}")
        counts = (report.stages, "stage"), (report.files, "file"), (report.tensors, "tensor")
        what = ", ".join(counted(number, name) for number, name in counts)
        compared = ", equal to the source" if source is not None and report.ok else ""
        state = "ok" if report.ok else counted(len(report.problems), "problem")
        display.line(f"{state}: {what}, {size(report.bytes)}{compared}")
    if report.unhashed:
        cure = f"reshard verify {shlex.quote(out)} --write-checksums"
        display.messages((), (f"files without a checksum: {report.unhashed}; to add them: {cure}",))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def inspect(
    source: Source,
    check_hashes: Annotated[
        bool,
        typer.Option("--check-hashes", help="Hash the files against their published checksums."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint or a set holds."""
    from reshard.checkpoint import open_checkpoint
    from reshard.display import Display
    from reshard.inspect import check_hashes as check_file_hashes
    from reshard.inspect import inspect as inspect_checkpoint

    display = Display()
    checkpoint = open_checkpoint(source)
    document = inspect_checkpoint(checkpoint)
    problems: list[dict[str, str]] = []
    if check_hashes:
        with _working(display, writes=False) as bars:
            hashes = check_file_hashes(checkpoint, progress=bars)
        problems = [{"file": p.file, "problem": p.problem} for p in hashes.problems]
        document["hashes"] = {
            "checked": hashes.checked,
            "unknown": hashes.unknown,
            "problems": problems,
        }
    if as_json:
        _print_json(document)
    else:
        display.inspection(document)
        display.messages(document["warnings"], document["notes"])
    if problems:
        raise typer.Exit(1)


@app.command()
def merge(
    out: Set,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Directory to write.")],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Turn a set back into one ordinary checkpoint."""
    from reshard.display import Display
    from reshard.merge import merge as merge_set

    display = Display(quiet=quiet)
    with _working(display) as bars:
        outcome = merge_set(_directory(out), _directory(dest), progress=bars)
    _show_outcome(display, outcome, {}, dest, as_json)


@app.command()
def push(
    out: Set,
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="org/name on the Hub; created if missing.")
    ],
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage", metavar="K", help="Add these stages only: 2, 0-3, 0,1 or all. Repeatable."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="If the repository is created, make it private.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="BRANCH", help="Branch; created, empty, if missing."),
    ] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead.")
    ] = False,
    nodes: Nodes = None,
    jobs: Jobs = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Publish a set, or stages of it, on the Hugging Face Hub."""
    from reshard.bundle import BundleSet
    from reshard.describe import push_document
    from reshard.display import Display
    from reshard.launch import node_commands, share_stages
    from reshard.partition import parse_stages
    from reshard.push import push as push_set

    display = Display(quiet=quiet)
    with _working(display) as bars:
        bundle = BundleSet.open(_directory(out))
        share_stages(bundle.manifest.pp_size, nodes)
        pushed = push_set(
            bundle,
            repo,
            stages=parse_stages(stage, bundle.manifest.pp_size) if stage else None,
            private=private,
            revision=revision,
            create_pr=create_pr,
            jobs=jobs,
            progress=bars,
        )
    commands = node_commands(pushed.manifest, f"{pushed.reference.repo}@{pushed.commit}", nodes)
    if as_json:
        document = push_document(pushed)
        document["launch"] = [command._asdict() for command in commands]
        _print_json(document)
    else:
        display.line(_pushed(pushed))
        display.launch(commands, pushed.manifest.engine.name)
    display.messages((), pushed.notes)


@app.command()
def pull(
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT|REPO", help="A set: its directory, or org/name[@revision] on the Hub."
        ),
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="Directory to write, or to add stages to.")
    ],
    stage: Annotated[
        list[str],
        typer.Option("--stage", metavar="K", help="Stages: 2, 0-3, 0,1 or all. Repeatable."),
    ],
    jobs: Jobs = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Take stages out of a set: a model directory with exactly those."""
    from reshard.bundle import BundleSet
    from reshard.display import Display
    from reshard.partition import parse_stages
    from reshard.pull import pull as pull_stages

    display = Display(quiet=quiet)
    with _working(display) as bars:
        bundle = BundleSet.open(_given(out))
        stages = parse_stages(stage, bundle.manifest.pp_size)
        outcome = pull_stages(bundle, _directory(dest), stages, jobs=jobs, progress=bars)
    _show_outcome(display, outcome, bundle.source.origin, dest, as_json)


@app.command()
def forward(
    stage_dir: Annotated[
        str,
        typer.Argument(metavar="STAGE_DIR", help="A stage directory, or a set and --stage."),
    ],
    stage: Annotated[
        int | None, typer.Option("--stage", metavar="K", help="Which stage, of a set with several.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to run.")
    ] = "auto",
    backend: Annotated[
        str,
        typer.Option(
            "--backend", metavar="auto|reference|grouped|triton", help="How to run the experts."
        ),
    ] = "auto",
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, max=1 << 24, help="Tokens at a time.")
    ] = 64,
    layer: Annotated[
        list[int] | None,
        typer.Option("--layer", metavar="L", help="Run this layer only. Repeatable."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare each layer with the reference backend.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the MoE blocks of a stage on random hidden states, and time them."""
    from reshard.display import Display
    from reshard.runtime.fused import BACKENDS
    from reshard.runtime.loader import load_stage
    from reshard.runtime.measure import forward_document

    chosen = next((known for known in BACKENDS if known == backend), None)
    if chosen is None:
        raise UsageError(f"--backend {quoted(backend)} is none of {', '.join(BACKENDS)}")
    display = Display()
    with _working(display, writes=False) as bars:
        weights = load_stage(
            _given(stage_dir),
            stage=stage,
            device=None if device == "auto" else device,
            progress=bars,
        )
        bars.close()
        layers = list(dict.fromkeys(layer or weights.experts))
        document = forward_document(weights, layers, tokens=tokens, backend=chosen, check=check)
    if as_json:
        _print_json(document)
    else:
        display.forward(document)
    if not document["ok"]:
        raise typer.Exit(1)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Sayer(logging.Handler):
    """Says on stderr what happens meanwhile: waiting for the Hub, reading from the cache.

    Several connections that wait for the same reason say so once.
    """

    quiet = False
    _said: tuple[str, float] = ("", 0.0)

    def emit(self, record: logging.LogRecord) -> None:
        # Other seconds, but as many digits of them, are no news.
        alike = re.sub(r"\d(?=[\d.]* ?s\b)", "0", record.getMessage())
        last, when = self._said
        if not self.quiet and (alike != last or record.created - when > 1):
            self._said = (alike, record.created)
            say(f"note: {record.getMessage()}")


_SAYER = _Sayer()


def _be_quiet(quiet: bool) -> bool:
    _SAYER.quiet = quiet
    return quiet


@contextmanager
def _working(display: Display, *, writes: bool = True) -> Iterator[Bars]:
    """Progress of long work, which the user may interrupt."""
    bars = display.progress()
    for number in _SIGNALS:  # end as Ctrl-C does: temporary files removed
        _on_signal(number, signal.default_int_handler)
    try:
        yield bars
    except KeyboardInterrupt:
        hint = "run the same command again; it continues where it stopped" if writes else None
        raise Interrupted("interrupted", hint=hint) from None
    finally:
        bars.close()


def _build_plan(
    source: str,
    pp_size: int,
    engine: str,
    layers: str | None,
    balance: bool,
    exclude: list[str] | None,
    replicate: list[str] | None,
    include_file: list[str] | None,
    ignore_file: list[str] | None,
) -> ReshardPlan:
    from reshard.checkpoint import open_checkpoint
    from reshard.partition import parse_counts
    from reshard.plan import build_plan

    return build_plan(
        open_checkpoint(source, include_files=include_file or (), ignore_files=ignore_file or ()),
        pp_size,
        engine=engine.lower(),
        layers=parse_counts(layers) if layers is not None else None,
        balance=balance,
        exclude=_names(exclude),
        replicate=_names(replicate),
    )


def _given(text: str) -> str:
    """An argument; an empty one (an unset variable) would mean the current directory."""
    if not text:
        raise UsageError("a directory argument is empty")
    return text


def _directory(text: str) -> Path:
    return Path(_given(text))


def _names(values: list[str] | None) -> tuple[str, ...]:
    """Names given by repeating an option, or with commas."""
    return tuple(filter(None, dict.fromkeys(",".join(values or ()).split(","))))


def _show_outcome(
    display: Display, outcome: Outcome, origin: Mapping[str, str], dest: str, as_json: bool
) -> None:
    from reshard.describe import outcome_document

    document = outcome_document(outcome, origin)
    if as_json:
        _print_json(document)
    else:
        display.line(_counts(document, dest))


def _title(document: dict[str, Any], what: str) -> str:
    from reshard.placement import ENGINES
    from reshard.units import size

    source = document["source"]
    engine = ENGINES[document["engine"]]
    return (
        f"{what}: {source['model_type']}, {source['tensors']:,} tensors, {size(source['bytes'])}, "
        f"{document['pp_size']} stages for {engine.name} {engine.version}"
    )


def _counts(document: dict[str, Any], where: str) -> str:
    from reshard.describe import HOWS

    counts = [f"{document[how]} {how}" for how in HOWS if document[how]]
    if not document["changed"]:
        counts = ["complete already; reshard verify reads the contents"]
    what = ", ".join(counts) or "side files, indexes and manifests written anew"
    return f"{quoted(where)}: {what}"


def _pushed(pushed: Pushed) -> str:
    from reshard.units import counted, size

    there = f"{pushed.reference} at {pushed.commit}"
    if not pushed.changed:
        return f"{there}: holds all of it already"
    what = [f"{counted(pushed.added, 'file')} added ({size(pushed.added_bytes)})"]
    what += [f"{pushed.copied} copied there"] if pushed.copied else []
    what += [f"{pushed.deleted} deleted"] if pushed.deleted else []
    what += [f"pull request {pushed.pull_request}"] if pushed.pull_request else []
    return f"{there}: {', '.join(what)}"


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def main() -> None:
    """Run the command line; exit codes are in docs/cli.md."""
    # What huggingface_hub would print names signed addresses; reshard tells what people should know.
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("reshard").addHandler(_SAYER)
    its_waits = logging.getLogger("huggingface_hub.utils._http")
    its_waits.setLevel(logging.WARNING)
    its_waits.propagate = False
    its_waits.addHandler(_SAYER)
    its_waits.addFilter(lambda record: record.getMessage().startswith(("Rate limit", "Retrying")))
    # Planning makes some hundred thousand long-lived objects and no cycles worth looking for.
    gc.disable()
    for number in _SIGNALS:
        _on_signal(number, _end_at_once)  # until there is anything to tidy up
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ReshardError as error:
        if os.environ.get("RESHARD_DEBUG") == "1":
            raise
        _fail(error.message, error.hint, error.exit_code)
    except OSError as error:
        if error.filename is None:  # a stream; whatever is left in it goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"{quoted(str(error.filename or 'standard output'))}: {error.strerror}")
    except RecursionError:
        _fail("a JSON file is nested too deeply")
    except MemoryError:
        _fail("there is not enough memory")


def _on_signal(number: signal.Signals, handler: Callable[..., object]) -> None:
    """Handle a signal, unless it is ignored, as under nohup."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def _end_at_once(*_: object) -> None:
    say("error: interrupted")
    os._exit(Interrupted.exit_code)


def _fail(message: str, hint: str | None = None, exit_code: int = 1) -> NoReturn:
    say(f"error: {message}")
    if hint:
        say(f"hint: {hint}")
    if exit_code == Interrupted.exit_code:
        os._exit(exit_code)  # the library's threads may still be sending; nobody waits for them
    sys.exit(exit_code)
