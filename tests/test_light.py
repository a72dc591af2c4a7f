"""The package is light: what is imported when, what is installed for whom, and which doors the documentation uses."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sosp
from helpers import pages
from helpers.pages import ROOT

PACKAGES = ["sosp", "sosp.baselines", "sosp.data", "sosp.studies", "sosp.training"]  # whose names are imported late
DOORS = {
    "sosp",
    "sosp.extend",
    "sosp.baselines",
    "sosp.studies",
    "sosp.nets",
    "sosp.data",
    "sosp.errors",
    "sosp.training",
}
SOURCE = ROOT / "src" / "sosp"
MODULES = sorted(SOURCE.rglob("*.py"))
TELL = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def python(code: str, *without: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, in which some packages are not installed."""
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    command = [sys.executable, "-c", f"import sys; {hidden}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def loaded(code: str) -> set[str]:
    """The modules that a fresh interpreter has after some code."""
    found = python(f"{code}\n{TELL}")
    assert found.returncode == 0, found.stderr
    return set(json.loads(found.stdout.splitlines()[-1]))


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


# --- what is imported when ------------------------------------------------------------------------------


def test_import_sosp_loads_next_to_nothing() -> None:
    modules = loaded("import sosp; dir(sosp)")
    assert len([name for name in modules if name.startswith("sosp")]) < 10
    assert "torch" not in modules


def test_pruning_needs_neither_the_program_nor_what_draws_nor_training() -> None:
    modules = loaded("import sosp; sosp.prune; sosp.repair")
    assert tops(modules) & {"typer", "rich", "jinja2", "matplotlib"} == set()
    rooms = {name.split(".")[1] for name in modules if name.startswith("sosp.")}
    assert rooms & {"app", "studies", "baselines", "nets", "data", "training"} == set()


def test_the_list_of_commands_needs_no_torch() -> None:
    code = "sys.argv = ['sosp', '--help']\nfrom sosp.app import cli\ntry: cli.main()\nexcept SystemExit: pass"
    assert tops(loaded(code)) & {"torch", "jinja2", "matplotlib", "numpy"} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_names_that_are_imported_late(package: str) -> None:
    """The block under ``TYPE_CHECKING``, the table and ``__all__`` say the same; and each name is what it says."""
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    (split,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in split.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name for node in imports for alias in node.names}
    assert seen == set(module.__all__) - {"__version__"}
    for node in imports:
        for alias in node.names:
            given = getattr(module, alias.asname or alias.name)
            assert given is getattr(importlib.import_module(str(node.module)), alias.name, None) or (
                given is importlib.import_module(f"{node.module}.{alias.name}")
            )
    assert set(module.__all__) <= set(dir(module))


def test_a_fresh_package_knows_its_names_and_no_others() -> None:
    code = """
import pickle, sosp
from sosp import prune, learned, experiments, errors
assert sosp.prune is prune and callable(prune) and callable(sosp.compare) and callable(sosp.repair)
assert pickle.loads(pickle.dumps(sosp.train)) is sosp.train and pickle.loads(pickle.dumps(sosp.Schedule())).epochs
assert learned is sosp.baselines and experiments is sosp.studies.paper and sosp.graph.plan and sosp.training.Companion
assert [name for name in sosp.__all__ if name not in dir(sosp)] == []
assert not hasattr(sosp, "prnue") and not hasattr(sosp, "__wrapped__")
"""
    found = python(code)
    assert found.returncode == 0, found.stderr


# --- what is installed for whom -------------------------------------------------------------------------


def test_plain_sosp_needs_three_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[>=]", need)[0] for need in project["dependencies"]] == ["torch", "numpy", "safetensors"]
    extras = project["optional-dependencies"]
    assert {re.split(r"[>=]", need)[0] for need in extras["cli"] + extras["report"]} == {
        *("typer", "rich", "jinja2", "matplotlib")
    }
    assert all("sosp[cli,report]" in extras[name] for name in ("demo", "dev"))


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_names_the_extra_it_needs(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["sosp"].partition(":")
    for code in (
        f"from {module} import {function}; {function}()",
        "import runpy; runpy.run_module('sosp', None, '__main__')",
    ):
        found = python(code, package)
        assert (found.returncode, found.stdout) == (2, "")
        assert found.stderr == f"sosp: {package} is not installed: pip install 'sosp[cli]'\n"


def test_pruning_works_without_the_extras() -> None:
    code = """
import torch, sosp
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
data = torch.randn(20, 4), torch.randint(3, (20,))
pruned = sosp.prune(net, data, ratio=0.5, repair=True)
sosp.train(pruned.model, data, sosp.Schedule(epochs=1))
"""
    found = python(code, "typer", "rich", "jinja2", "matplotlib")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_report_names_the_extra_it_needs(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sosp.app.report import keep_report, write_figures, write_report

    monkeypatch.setitem(sys.modules, package, None)
    said = re.escape(f"{package} is not installed: pip install 'sosp[report]'")
    with pytest.raises(sosp.errors.SospError, match=said):
        write_report([tmp_path])
    with pytest.raises(sosp.errors.SospError, match=said):
        write_figures([tmp_path], tmp_path)
    warned: list[str] = []
    assert keep_report(tmp_path, warned.append, anew=True) is None
    assert re.search(said, warned[0])


def test_results_pages_name_the_extra_they_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sosp.core.optional_packages import import_package

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(sosp.errors.SospError, match=r"^matplotlib is not installed: pip install 'sosp\[report\]'$"):
        import_package("matplotlib.figure")


# --- the doors ------------------------------------------------------------------------------------------


def shown_code() -> dict[str, str]:
    """Place -> Python code that a reader is shown: blocks of pages, examples, cells of the notebook."""
    found = {
        b.place: b.code
        for page in pages.pages(["README.md", "CONTRIBUTING.md", "docs/**/*.md"])
        for b in pages.blocks(page)
        if b.language == "python"
    }
    found |= {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    cells = json.loads((ROOT / "examples" / "story.ipynb").read_text())["cells"]
    return found | {f"story.ipynb#{c['id']}": "".join(c["source"]) for c in cells if c["cell_type"] == "code"}


def too_deep(code: str) -> list[str]:
    """Modules of sosp below the public doors that code imports from or reaches into."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    names += [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += [n.group() for n in re.finditer(r"\bsosp(\.\w+)+", code)]
    modules = {f"sosp.{path.relative_to(SOURCE).with_suffix('').as_posix().replace('/', '.')}" for path in MODULES}
    modules |= {name.removesuffix(".__init__") for name in modules}
    reached = {name.rsplit(".", i)[0] for name in names for i in range(name.count("."))} | set(names)
    return sorted(reached & modules - DOORS)


def test_what_readers_are_shown_uses_the_doors() -> None:
    shown = shown_code()
    assert len(shown) > 30
    assert {place: deep for place, code in shown.items() if (deep := too_deep(code))} == {}


def test_deep_imports_are_found() -> None:
    assert too_deep("from sosp.scoring.methods import Method") == ["sosp.scoring", "sosp.scoring.methods"]
    assert too_deep("import sosp.graph.plan") == ["sosp.graph", "sosp.graph.plan"]
    assert too_deep("import sosp\nfrom sosp.extend import Method\nsosp.data.load('x')\nsosp.errors.SospError") == []


def test_doors_have_what_they_list() -> None:
    for door in sorted(DOORS - {"sosp.errors"}):
        module = importlib.import_module(door)
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
