"""The shape of the repository: who may import whom, the public names, and what every file owes its reader."""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import sosp

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "sosp"

# Module -> the sosp modules it may import. Lower levels first: an entry may name only entries above it.
# "criteria" stands for the whole package, "sosp" for `__init__.py`.
ALLOWED = {
    "errors": "",
    "core": "errors",
    "graph": "errors core",
    "selection": "errors core graph",
    "surgery": "errors core graph",
    "refit": "errors core graph surgery",
    "scoring": "errors core graph",
    "nets": "errors core surgery",
    "data": "errors core",
    "training": "errors core data",
    "baselines": "errors core graph selection surgery scoring data training",
    "pipeline": "errors core graph selection surgery refit scoring training",
    "extend": "errors core scoring",
    "studies": "errors core graph selection surgery refit scoring nets data training baselines pipeline",
    "sosp": "errors core graph selection surgery refit scoring nets data training baselines pipeline extend studies",
    "app": "errors core graph selection surgery refit scoring nets data training baselines pipeline studies sosp",
    "__main__": "errors core app",
}

# In the order of the flow.
PUBLIC = [
    *("prune", "Pruned"),
    *("trace", "Flow", "find_structures", "downsampling", "Structures", "Layer"),
    *("score", "METHODS", "Saliency", "SlowPathWarning"),
    *("select", "Mask", "masked"),
    *("eigendamage", "Eigendamaged"),
    *("shrink", "widen", "count", "Cost", "latency", "Latency"),
    *("repair", "Repaired"),
    *("compare",),
    *("bottlenecks", "Bottlenecks", "expand"),
    *("train", "Trained", "Schedule", "SCHEDULES", "Speed", "evaluate", "Accuracy", "recalibrate"),
    *("save", "load", "inspect"),
    *("nets", "data", "learned", "experiments", "extend", "errors", "__version__"),
]

# Oracles stand on torch and the standard library alone, and may not reach sosp by a detour.
ORACLE_ROOTS = (sys.stdlib_module_names - {"importlib", "runpy"}) | {"torch", "oracles"}


# --- reading files --------------------------------------------------------------------------------------


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def short_name(path: Path) -> str:
    return str(path.relative_to(TESTS.parent))


def dotted_name(path: Path) -> str:
    """``src/sosp/criteria/sosp.py`` -> ``sosp.criteria.sosp``; a package keeps its ``__init__``."""
    return ".".join(["sosp", *path.relative_to(SOURCE).with_suffix("").parts])


def entry_of(dotted: str) -> str:
    """The table entry that answers for a dotted name: its first part below ``sosp``, or ``sosp`` itself."""
    below = dotted.removesuffix(".__init__").split(".")[1:]
    return below[0] if below else "sosp"


def absolute(node: ast.ImportFrom, dotted: str) -> str:
    """The module ``node`` imports from, with leading dots resolved against the importing module."""
    if not node.level:
        return node.module or ""
    return ".".join([*dotted.split(".")[: -node.level], *([node.module] if node.module else [])])


# --- the checks: from source text to a list of complaints -----------------------------------------------


def imported(source: str, dotted: str, table: Iterable[str] = ()) -> list[str]:
    """Every module that ``source`` imports, anywhere in it, as dotted names."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node, dotted)
            # `from sosp import errors` imports a module, `from sosp import score` a name of the package.
            modules = [f"sosp.{alias.name}" for alias in node.names if alias.name in table]
            named_all = len(modules) == len(node.names)
            names += (modules if named_all else [*modules, origin]) if origin == "sosp" else [origin]
    return names


def forbidden_imports(source: str, dotted: str, table: dict[str, str]) -> list[str]:
    own = entry_of(dotted)
    if own not in table:
        return [f"{dotted} is not in the table ALLOWED"]
    used = {entry_of(name) for name in imported(source, dotted, table) if name.split(".")[0] == "sosp"}
    return [f"{dotted} imports {name}" for name in sorted(used - {own} - set(table[own].split()))]


def upward_entries(table: dict[str, str]) -> list[str]:
    order = list(table)
    return [
        f"{name} may import {other}, which does not stand above it"
        for position, name in enumerate(order)
        for other in table[name].split()
        if other not in order[:position]
    ]


def is_assertion(node: ast.AST) -> bool:
    """An assert, ``pytest.raises`` or ``warns``, or a call of something named ``check_*`` or ``assert_*``."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in {"raises", "warns"} or name.startswith(("check_", "assert_"))


def silent_tests(source: str) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if not any(is_assertion(part) for part in ast.walk(node))
    ]


def foreign_imports(source: str) -> list[str]:
    return [name for name in imported(source, "oracles.some_oracle") if name.split(".")[0] not in ORACLE_ROOTS]


def missing_docstring(source: str) -> list[str]:
    return [] if ast.get_docstring(ast.parse(source)) else ["no docstring"]


def bare_excepts(source: str) -> list[str]:
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    return [f"bare except in line {node.lineno}" for node in handlers if node.type is None]


# --- the repository passes them -------------------------------------------------------------------------

MODULES = pytest.mark.parametrize("path", python_files(SOURCE), ids=short_name)
TEST_FILES = pytest.mark.parametrize("path", python_files(TESTS), ids=short_name)
ORACLES = pytest.mark.parametrize("path", python_files(TESTS / "oracles"), ids=short_name)


@MODULES
def test_imports_are_allowed(path: Path) -> None:
    assert forbidden_imports(path.read_text(), dotted_name(path), ALLOWED) == []


def test_table_points_one_way_and_is_not_stale() -> None:
    assert upward_entries(ALLOWED) == []
    assert {entry_of(dotted_name(path)) for path in python_files(SOURCE)} == set(ALLOWED)


def test_public_names() -> None:
    assert list(sosp.__all__) == PUBLIC
    assert [name for name in PUBLIC if not hasattr(sosp, name)] == []


@TEST_FILES
def test_every_test_asserts(path: Path) -> None:
    assert silent_tests(path.read_text()) == []


@ORACLES
def test_oracles_share_nothing_with_the_library(path: Path) -> None:
    assert foreign_imports(path.read_text()) == []


@MODULES
def test_modules_say_what_they_do(path: Path) -> None:
    assert missing_docstring(path.read_text()) == []


@pytest.mark.parametrize("path", python_files(SOURCE) + python_files(TESTS), ids=short_name)
def test_no_bare_except(path: Path) -> None:
    assert bare_excepts(path.read_text()) == []


# --- and each check can fail ----------------------------------------------------------------------------


# A small table of its own, so that these examples stay as they are when modules move.
EXAMPLE = {"low": "", "left": "low", "right": "low", "sosp": "low left", "top": "low sosp"}


@pytest.mark.parametrize(
    ("dotted", "source", "complaint"),
    [
        ("sosp.low", "import sosp.left", "sosp.low imports left"),
        ("sosp.left", "from sosp import low, right", "sosp.left imports right"),
        ("sosp.left", "from sosp import score", "sosp.left imports sosp"),
        ("sosp.left", "from sosp.right import gradient", "sosp.left imports right"),
        ("sosp.left", "from .right import gradient", "sosp.left imports right"),
        ("sosp.left", "def f():\n    from . import top", "sosp.left imports top"),
        ("sosp.left.inner", "from ..right import masked", "sosp.left.inner imports right"),
        ("sosp.left.__init__", "from ..right import masked", "sosp.left.__init__ imports right"),
        ("sosp.__init__", "from . import top", "sosp.__init__ imports top"),
        ("sosp.utils", "", "sosp.utils is not in the table ALLOWED"),
    ],
)
def test_forbidden_imports_are_found(dotted: str, source: str, complaint: str) -> None:
    assert forbidden_imports(source, dotted, EXAMPLE) == [complaint]


@pytest.mark.parametrize(
    ("dotted", "source"),
    [
        ("sosp.left", "import torch\nfrom sosp.low import SospError\nfrom .low import Layer"),
        ("sosp.left.__init__", "from .inner import rank_h\nfrom ..low import Saliency"),
        ("sosp.left.inner", "from sosp.left.table import METHODS\nfrom sosp.low import gradient"),
        ("sosp.top", "import sosp"),
    ],
)
def test_allowed_imports_pass(dotted: str, source: str) -> None:
    assert forbidden_imports(source, dotted, EXAMPLE) == []


def test_upward_entries_are_found() -> None:
    assert len(upward_entries({"low": "high", "high": "low"})) == 1


@pytest.mark.parametrize(
    "body", ["assert x", "with pytest.raises(E): f()", "check_close(a)", "torch.testing.assert_close(a, b)"]
)
def test_silent_tests_are_found(body: str) -> None:
    assert silent_tests("def test_a():\n    print(1)") == ["test_a"]
    assert silent_tests(f"def test_a():\n    {body}") == []


@pytest.mark.parametrize("source", ["import sosp", "from sosp.gates import x", "import numpy", "import cases"])
def test_foreign_imports_are_found(source: str) -> None:
    assert len(foreign_imports(source)) == 1
    assert foreign_imports("import math, torch.nn\nfrom oracles.dense import hessian\nfrom . import nets") == []


def test_missing_docstrings_are_found() -> None:
    assert missing_docstring("# a comment is not a docstring\nx = 1") == ["no docstring"]
    assert missing_docstring('"""One step."""') == []


def test_bare_excepts_are_found() -> None:
    assert bare_excepts("try:\n    f()\nexcept:\n    pass") == ["bare except in line 3"]
    assert bare_excepts("try:\n    f()\nexcept ValueError:\n    pass") == []
