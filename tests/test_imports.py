"""Arrows point down; siblings are strangers; the spec never knows it is fast; kernels never know why they were asked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tilewise"

LEVELS = {
    0: {"_typing", "_errors"},
    1: {"arrays", "positions", "mask", "score", "dropout", "ragged", "problem"},
    2: {"softmax", "tiles", "cost", "machine", "cases"},
    3: {"reference"},
    4: {"backends"},
    5: {"request", "recall", "ops"},
    6: {"api"},
    7: {"warm", "ring"},
    8: {"compat", "explain", "bench", "testing", "demo", "cli", "__main__"},
}
LEVEL = {name: level for level, names in LEVELS.items() for name in names}
THIRD_PARTY = {
    0: set(),
    1: {"numpy"},
    2: {"numpy"},
    3: {"numpy"},
    4: {"numpy", "torch", "triton", "llvmlite"},
    5: {"numpy", "torch"},
    6: {"numpy", "torch"},
    7: {"numpy", "torch"},
    8: {"numpy", "torch", "typer", "rich", "click", "matplotlib", "transformers", "jinja2", "markupsafe"},
}
RUNS_PLANS: set[str] = {
    "__init__", "agree", "api", "call", "exchange", "execute", "kernel", "local", "meet", "nccl", "transport",
}  # fmt: skip
"""Files of `ring` that may speak of tensors and processes; all others are descriptions, as pure as levels 0 to 2."""
HANDS_OVER = {"hopper": {"triton"}}
"""Backends that leave part of a pass to another: what Hopper's kernels do not make of gradients, Triton's do."""
ENTRANCES = {"__init__"}  # re-exports what users call
SIBLINGS_ALLOWED = {"cli", "__main__", "demo"}


def unit(path: Path) -> str:
    """The part of the package a file belongs to: its top folder or its own name."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path, text: str) -> list[tuple[str, str, bool]]:
    """(package, dotted rest, inside a function) of every import; relative ones resolved to `tilewise`."""
    package = ["tilewise", *path.relative_to(SOURCE).parts[:-1]]
    tree, found = ast.parse(text), []
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{a.name}" if stem == "tilewise" else stem for a in node.names]
        for name in names:
            head, _, rest = name.partition(".")
            found.append((head, rest, node in inside))
    return found


def may_import(path: Path, rest: str, lazy: bool) -> bool:
    """Whether the table allows a file to import `tilewise.<rest>`."""
    mine, theirs = unit(path), rest.split(".")[0]
    level = LEVEL[mine]
    if theirs in ("", "__version__"):
        return level == 8  # the package's front door
    described = theirs == "ring" and rest.split(".")[-1] not in RUNS_PLANS
    if is_pure_ring(path):
        return LEVEL[theirs] <= 2 or described
    if mine == "explain":
        return theirs == mine or LEVEL[theirs] <= 3 or described
    if level == 8:
        return LEVEL[theirs] < 8 or theirs == mine or mine in SIBLINGS_ALLOWED or (mine, theirs) == ("bench", "testing")
    if theirs == "backends" and level == 5:
        return lazy  # launchers only when executed
    if theirs == "backends" and level == 6:
        return rest in ("backends", "backends.plan")  # the protocol and the choice
    if mine == theirs == "backends":
        return not_a_sibling(path, rest)
    if mine == "backends":
        return LEVEL[theirs] <= 2  # never the reference
    return theirs == mine or LEVEL[theirs] < level or (LEVEL[theirs] == level and level in (0, 1, 2, 5))


def is_pure_ring(path: Path) -> bool:
    """Whether a file describes plans for many devices, and does not run them."""
    return unit(path) == "ring" and path.stem not in RUNS_PLANS


def not_a_sibling(path: Path, rest: str) -> bool:
    """A backend's folder may import itself and the files beside it, never another backend, but for one to which it hands
    over."""
    folder, target = path.relative_to(SOURCE).parts[1], rest.split(".")[1:2]
    if folder.endswith(".py") or target in ([], [folder]) or target[0] in HANDS_OVER.get(folder, ()):
        return True
    return (SOURCE / "backends" / f"{target[0]}.py").exists()


def broken_rules(path: Path, text: str) -> list[str]:
    """Every import of a file that the table forbids."""
    mine = unit(path)
    if mine in ENTRANCES:
        return []
    problems = []
    for head, rest, lazy in imports(path, text):
        if head in sys.stdlib_module_names:
            continue
        allowed = {"numpy"} if is_pure_ring(path) else THIRD_PARTY[LEVEL[mine]]
        if head != "tilewise" and head not in allowed:
            problems.append(f"{mine} may not import {head}")
        if head == "tilewise" and not may_import(path, rest, lazy):
            problems.append(f"{mine} may not import tilewise.{rest}".rstrip("."))
    return problems


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_file_has_a_level():
    assert {unit(path) for path in FILES} - ENTRANCES <= set(LEVEL)
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_follow_the_table(path):
    assert broken_rules(path, path.read_text()) == []


PLANTED = {
    "mask/base.py": {"import torch": "mask may not import torch"},
    "softmax.py": {"from .reference import plain": "softmax may not import tilewise.reference"},
    "reference/flash.py": {"from ..backends import make_plan": "reference may not import tilewise.backends"},
    "backends/torch/forward.py": {
        "from ...reference import plain": "backends may not import tilewise.reference",
        "from ..triton.steps import absorb": "backends may not import tilewise.backends.triton.steps",
    },
    "backends/triton/call.py": {"from ..hopper.steps import hide": "backends may not import tilewise.backends.hopper.steps"},
    "backends/hopper/steps.py": {"from ..torch.tile import why_not": "backends may not import tilewise.backends.torch.tile"},
    "ops.py": {
        "from .backends import make_plan": "ops may not import tilewise.backends",
        "from .api import attention": "ops may not import tilewise.api",
    },
    "api.py": {"from . import testing": "api may not import tilewise.testing"},
    "cost.py": {"import tilewise.ops": "cost may not import tilewise.ops"},
    "compat/transformers.py": {"from ..testing import judge": "compat may not import tilewise.testing"},
    "problem.py": {"import tilewise": "problem may not import tilewise"},
    "ring/schedule.py": {
        "import torch": "ring may not import torch",
        "from ..api import attention": "ring may not import tilewise.api",
        "from ..reference import flash": "ring may not import tilewise.reference",
    },
}


@pytest.mark.parametrize("name, line", [(name, line) for name, lines in PLANTED.items() for line in lines])
def test_a_planted_import_is_found(name, line):
    assert broken_rules(SOURCE / name, line) == [PLANTED[name][line]]


def modules_after(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_tilewise_brings_nothing_heavy_that_torch_does_not():
    extra = {m.split(".")[0] for m in modules_after("import tilewise") - modules_after("import torch")}
    assert not extra & {"triton", "llvmlite", "transformers", "matplotlib", "typer", "rich", "scipy", "pandas"}
    fresh = modules_after("import tilewise")
    assert not {m for m in fresh if m.startswith("tilewise.") and m.split(".")[1] in LEVELS[8] | {"reference"}}


@pytest.mark.parametrize(
    "name",
    [
        "mask",
        "problem",
        "tiles",
        "cost",
        "softmax",
        "cases",
        "reference.plain",
        "reference.flash",
        "ring.verify",
        "ring.choose",
        "machine",
        "cost.paper",
        "reference.flash1",
        "reference.stored",
    ],
)
def test_levels_up_to_the_spec_need_numpy_only(name):
    """With torch made unimportable, everything up to the readable spec still loads (past the package's front door)."""
    stub = "import sys, types; sys.modules['torch'] = None; p = types.ModuleType('tilewise')"
    code = f"{stub}; p.__path__ = [{str(SOURCE)!r}]; sys.modules['tilewise'] = p; import tilewise.{name}"
    assert f"tilewise.{name}" in modules_after(code)
