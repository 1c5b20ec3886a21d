"""What keeps the code readable: sizes of files, functions and parameter lists. Kernels, and the pieces that they are made of,
take all that they need as parameters."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
PUBLIC = {"attention", "attention_with_lse", "attention_varlen", "plan"}  # the entry points of api.py
LINES, FUNCTION_LINES, KERNEL_LINES, PARAMETERS = 400, 60, 150, 8


def too_large(name: str, text: str) -> list[str]:
    """Everything in a file that passes a limit. Command-line functions declare their options as parameters."""
    problems = [f"{name}: {text.count(chr(10))} lines"] if text.count("\n") > LINES else []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or 0) - node.lineno + 1
        on_device = any(ast.unparse(d) in ("kernel", "triton.jit", "gluon.jit") for d in node.decorator_list)
        if length > (KERNEL_LINES if on_device else FUNCTION_LINES):
            problems.append(f"{name}: {node.name} has {length} lines")
        a = node.args
        count = len([x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")])
        is_command = "typer." in ast.unparse(node.args)
        is_entrance = (name.endswith("api.py") and node.name in PUBLIC) or "/compat/" in name  # others' signatures
        if count > PARAMETERS and not is_command and not is_entrance and not on_device:
            problems.append(f"{name}: {node.name} takes {count} parameters")
    return problems


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_function_or_parameter_list_is_too_long(path):
    assert too_large(str(path), path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    ["x = 1\n" * 401, "def f():\n" + "    x = 1\n" * 60, f"def f({', '.join('abcdefghi')}): pass\n"],
    ids=["file", "function", "parameters"],
)
def test_what_is_too_long_is_found(text):
    assert len(too_large("planted.py", text)) == 1


def test_there_is_no_drawer_for_odds_and_ends():
    assert not [p for p in FILES if p.stem in ("utils", "helpers", "common", "misc")]
