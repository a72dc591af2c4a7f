"""The shape of the repository: who may import whom, how things are named, and what every file owes its reader."""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import sosp

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "sosp"

# Room -> the rooms it may import. Lower ones first: a row may name only rows above it. "sosp" is `__init__.py`.
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
MOST_ROWS, MOST_ENTRIES = 19, 18  # of the table, and of src/sosp with its py.typed

# In the order of the flow.
PUBLIC = [
    *("prune", "Pruned", "PruningWarning", "tradeoff", "Tradeoff", "TradeoffPoint", "Scoring", "Selection", "Repair"),
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

# A function that another file imports is named verb_object. One word is for what a user calls by that name: the public
# functions, scoring methods and baselines, networks, datasets, experiments, commands, and quantities of the formulas.
ONE_WORD = {
    *PUBLIC,
    *("ccp", "fisher", "fpgm", "hrank", "obd", "slimming", "snip", "taylor", "gradient"),
    *("amc", "gal", "variational"),
    *("resnet18", "resnet20", "resnet32", "resnet32x4", "resnet44", "resnet50", "resnet56", "resnet110"),
    *("plainnet20", "densenet40", "vgg19", "cifar10", "cifar100", "digits", "folder"),
    *("imagenet", "correlations", "runtime", "shuffle", "demo"),
}


# --- reading files --------------------------------------------------------------------------------------


@cache
def trees(folder: Path) -> dict[Path, ast.Module]:
    """The syntax tree of every Python file in a folder."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def dotted_name(path: Path) -> str:
    """``src/sosp/graph/mask.py`` -> ``sosp.graph.mask``; a package keeps its ``__init__``."""
    return ".".join(["sosp", *path.relative_to(SOURCE).with_suffix("").parts])


def row_of(dotted: str) -> str:
    """The row of the table for a dotted name: its first part below ``sosp``, or ``sosp`` itself."""
    below = dotted.removesuffix(".__init__").split(".")[1:]
    return below[0] if below else "sosp"


def imported(tree: ast.AST, dotted: str, table: Iterable[str] = ()) -> Iterator[str]:
    """Every module that is imported, anywhere in a file, as a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [*dotted.split(".")[: -node.level], *([node.module] if node.module else [])]
            origin = ".".join(parts) if node.level else node.module or ""
            names = {alias.name for alias in node.names}
            # `from sosp import errors` imports a module, `from sosp import score` a name of the package.
            rooms = names & set(table) if origin == "sosp" else set()
            yield from (f"sosp.{name}" for name in sorted(rooms))
            if names - rooms:
                yield origin


# --- the checks: from a syntax tree to a list of complaints ---------------------------------------------


def forbidden_imports(tree: ast.AST, dotted: str, table: dict[str, str]) -> list[str]:
    own = row_of(dotted)
    if own not in table:
        return [f"{dotted} is in no row of the table"]
    used = {row_of(name) for name in imported(tree, dotted, table) if name.split(".")[0] == "sosp"}
    return [f"{dotted} imports {name}" for name in sorted(used - {own} - set(table[own].split()))]


def upward_rows(table: dict[str, str]) -> list[str]:
    order = list(table)
    return [
        f"{row} -> {other}" for i, row in enumerate(order) for other in table[row].split() if other not in order[:i]
    ]


def repeated_classes(files: Iterable[ast.AST]) -> list[str]:
    names = Counter(node.name for tree in files for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return [name for name, times in names.items() if times > 1]


def one_word_functions(files: Mapping[str, ast.Module]) -> list[str]:
    """Functions of one word that another file imports; ``files``: dotted name -> tree."""
    nodes = [node for tree in files.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    wanted = {(node.module, alias.name) for node in nodes for alias in node.names if alias.name not in ONE_WORD}
    defined = {
        (dotted.removesuffix(".__init__"), node.name)
        for dotted, tree in files.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    return sorted(name for _, name in defined & wanted if "_" not in name)


def hidden_modules(package: ModuleType, modules: Iterable[str]) -> list[str]:
    """Modules of a package that cannot be reached by their name: it stands for something else."""
    return [name for name in modules if not isinstance(getattr(package, name, package), ModuleType)]


def is_assertion(node: ast.AST) -> bool:
    """An assert, ``pytest.raises`` or ``warns``, or a call of something named ``check_*`` or ``assert_*``."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in {"raises", "warns"} or name.startswith(("check_", "assert_"))


def silent_tests(tree: ast.AST) -> list[str]:
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return [test.name for test in tests if not any(is_assertion(part) for part in ast.walk(test))]


def foreign_imports(tree: ast.AST) -> list[str]:
    return [name for name in imported(tree, "oracles.some_oracle") if name.split(".")[0] not in ORACLE_ROOTS]


# --- the repository passes them -------------------------------------------------------------------------


def test_rooms_import_downwards_only() -> None:
    files = {dotted_name(path): tree for path, tree in trees(SOURCE).items()}
    assert [text for dotted, tree in files.items() for text in forbidden_imports(tree, dotted, ALLOWED)] == []
    assert upward_rows(ALLOWED) == []
    assert {row_of(dotted) for dotted in files} == set(ALLOWED)
    assert len(ALLOWED) <= MOST_ROWS
    entries = [path for path in SOURCE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES


def test_public_names() -> None:
    assert list(sosp.__all__) == PUBLIC
    assert [name for name in PUBLIC if not hasattr(sosp, name)] == []


def test_names_say_one_thing() -> None:
    files = trees(SOURCE)
    assert repeated_classes(files.values()) == []
    assert one_word_functions({dotted_name(path): tree for path, tree in files.items()}) == []
    for folder in {path.parent for path in files}:
        package = import_module(".".join(["sosp", *folder.relative_to(SOURCE).parts]))
        assert (
            hidden_modules(package, [path.stem for path in files if path.parent == folder and path.stem != "__init__"])
            == []
        )


def test_every_test_asserts() -> None:
    assert {path.name: silent_tests(tree) for path, tree in trees(TESTS).items() if silent_tests(tree)} == {}


def test_oracles_share_nothing_with_the_library() -> None:
    assert [name for tree in trees(TESTS / "oracles").values() for name in foreign_imports(tree)] == []


def test_tests_mirror_the_rooms_and_stay_inside_the_repository() -> None:
    tested = {path.parent.name for path in trees(TESTS) if path.name.startswith("test_") and path.parent != TESTS}
    assert tested <= set(ALLOWED)
    assert {row for row in ALLOWED if (SOURCE / row).is_dir()} <= tested
    outside = [path.name for path in trees(TESTS) if f'/ "sha{"red"}"' in path.read_text(encoding="utf-8")]
    assert outside == []


# --- and each check can fail ----------------------------------------------------------------------------

# A small table of its own, so that these examples stay as they are when modules move.
EXAMPLE = {"low": "", "left": "low", "right": "low", "sosp": "low left", "top": "low sosp"}
FORBIDDEN = {
    ("sosp.low", "import sosp.left"): "sosp.low imports left",
    ("sosp.left", "from sosp import low, right"): "sosp.left imports right",
    ("sosp.left", "from sosp import score"): "sosp.left imports sosp",
    ("sosp.left", "from sosp.right import gradient"): "sosp.left imports right",
    ("sosp.left", "from .right import gradient"): "sosp.left imports right",
    ("sosp.left", "def f():\n    from . import top"): "sosp.left imports top",
    ("sosp.left.inner", "from ..right import masked"): "sosp.left.inner imports right",
    ("sosp.left.__init__", "from ..right import masked"): "sosp.left.__init__ imports right",
    ("sosp.__init__", "from . import top"): "sosp.__init__ imports top",
    ("sosp.utils", ""): "sosp.utils is in no row of the table",
}
ALLOWED_EXAMPLES = {
    "sosp.left": "import torch\nfrom sosp.low import SospError\nfrom .low import Layer",
    "sosp.left.__init__": "from .inner import rank_h\nfrom ..low import Saliency",
    "sosp.left.inner": "from sosp.left.table import METHODS\nfrom sosp.low import gradient",
    "sosp.top": "import sosp",
}


def test_each_check_can_fail() -> None:
    for (dotted, source), complaint in FORBIDDEN.items():
        assert forbidden_imports(ast.parse(source), dotted, EXAMPLE) == [complaint]
    for dotted, source in ALLOWED_EXAMPLES.items():
        assert forbidden_imports(ast.parse(source), dotted, EXAMPLE) == []
    assert len(upward_rows({"low": "high", "high": "low"})) == 1
    assert repeated_classes([ast.parse("class A: pass"), ast.parse("def f():\n    class A: pass")]) == ["A"]
    assert one_word_functions({"a": ast.parse("def cook(): pass"), "b": ast.parse("from a import cook")}) == ["cook"]
    assert hidden_modules(sosp, ["score", "graph", "nothing"]) == ["score"]
    assert silent_tests(ast.parse("def test_a():\n    print(1)")) == ["test_a"]
    for body in ("assert x", "with pytest.raises(E): f()", "check_close(a)", "torch.testing.assert_close(a, b)"):
        assert silent_tests(ast.parse(f"def test_a():\n    {body}")) == []
    for source in ("import sosp", "from sosp.gates import x", "import numpy", "import networks"):
        assert len(foreign_imports(ast.parse(source))) == 1
    assert (
        foreign_imports(ast.parse("import math, torch.nn\nfrom oracles.dense import hessian\nfrom . import nets")) == []
    )
