"""What may import what: the parts of reshard depend on each other in one direction only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "reshard"
SOURCES = sorted(PACKAGE.rglob("*.py"))

ALLOWED = {
    "typer": ("cli.py",),
    "rich": ("display.py",),
    "tqdm": ("display.py",),
    "huggingface_hub": ("hub.py",),
    "yaml": ("card.py",),
    "torch": ("runtime/", "integrations/"),
    "safetensors": ("runtime/", "integrations/"),
    "transformers": ("runtime/stage.py",),
    "triton": ("runtime/fused/triton_kernels.py",),
    "vllm": ("integrations/vllm.py",),
    "sglang": ("integrations/sglang.py",),
}
"""Package -> the only places of reshard that may import it, wherever the import stands."""

TYPING_ONLY = {"typing_extensions"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def is_typing_block(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`: nothing in it is imported when the program runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Modules that a file imports: at its top level, or `everywhere` but for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module is not None, "imports name whole paths"
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif is_typing_block(child):
            continue
        elif everywhere or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(child, everywhere=everywhere)


def own_imports(path: Path, *, everywhere: bool) -> set[str]:
    """Modules of reshard that a file of it imports."""
    found = imports(ast.parse(path.read_bytes()), everywhere=everywhere)
    return {name for name in found if name in MODULES} - {"reshard"}


def packages(path: Path) -> set[str]:
    """Packages outside the standard library that a file imports, wherever in it."""
    found = {
        name.partition(".")[0] for name in imports(ast.parse(path.read_bytes()), everywhere=True)
    }
    return found - set(sys.stdlib_module_names) - {"reshard"}


def test_there_is_something_to_check() -> None:
    assert {"reshard", "reshard.cli", "reshard.header", "reshard.plan"} <= MODULES.keys()
    assert own_imports(PACKAGE / "plan.py", everywhere=False) >= {"reshard.canonical"}
    assert packages(PACKAGE / "cli.py") == {"typer"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_packages_are_imported_in_their_place_only(path: Path) -> None:
    place = path.relative_to(PACKAGE).as_posix()
    for package in packages(path):
        allowed = ALLOWED.get(package, ())
        assert place.startswith(allowed), f"{place} imports {package}; only {allowed} may"


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Imports inside functions count too: they only put an import off."""
    graph = {name: own_imports(path, everywhere=True) for name, path in MODULES.items()}
    layers = list(TopologicalSorter(graph).static_order())
    assert set(layers) == MODULES.keys()


def test_the_flow_goes_down() -> None:
    """What comes later in this list may use what comes before it, never the other way round."""
    flow = ["errors", "strict_json", "config", "header", "names", "source", "manifest", "bundle"]
    flow += ["checkpoint", "plan", "split", "runtime.share", "runtime.reading", "runtime.loader"]
    flow += ["runtime.moe", "cli"]
    graph = {name: own_imports(path, everywhere=True) for name, path in MODULES.items()}

    def needed(name: str) -> set[str]:
        found = set(graph[name])
        for other in graph[name]:
            found |= needed(other)
        return found

    for position, name in enumerate(flow):
        later = {f"reshard.{other}" for other in flow[position:]}
        assert not needed(f"reshard.{name}") & later, name


def test_the_runtime_decides_before_it_moves_bytes() -> None:
    """What a rank holds and how it lies is told without torch: it cannot touch a tensor."""
    for name in ("config", "expert_layout", "share", "fused/tiles"):
        assert not packages(PACKAGE / f"runtime/{name}.py"), name


def test_kernels_compile_without_torch() -> None:
    assert packages(PACKAGE / "runtime/fused/triton_kernels.py") == {"triton"}
    assert not own_imports(PACKAGE / "runtime/fused/triton_kernels.py", everywhere=True)


def test_what_is_pure_touches_no_files() -> None:
    """Planning is arithmetic over headers: these modules import nothing that could do more."""
    pure = {"names", "config", "partition", "placement", "canonical", "header", "layout", "errors"}
    forbidden = {"os", "pathlib", "io", "shutil", "tempfile", "mmap", "subprocess", "socket"}
    for name in pure:
        found = set(imports(ast.parse((PACKAGE / f"{name}.py").read_bytes()), everywhere=True))
        assert not found & forbidden, name


def loaded_by(code: str) -> set[str]:
    """The packages in memory after `code` has run in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_reshard_loads_the_standard_library_only() -> None:
    known = set(sys.stdlib_module_names) | {"reshard", "__main__"}
    before = loaded_by("pass")
    assert loaded_by("import reshard") - known <= before - known


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['reshard', '--help']\nfrom reshard.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass"
    heavy = {"torch", "transformers", "numpy", "huggingface_hub", "safetensors", "tqdm"}
    assert not loaded_by(code) & heavy


def test_every_module_can_be_imported_first() -> None:
    """A circle that an order of imports hides shows when another module comes first."""
    light = [name for name in MODULES if ".runtime" not in name and ".integrations" not in name]
    for name in light:
        code = f"import {name}\nimport sys\nassert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
