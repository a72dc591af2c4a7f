"""What to do next: the commands and the lines of Python that go on from a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from sosp.app.config import Config, PruningSection
from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import ReportSection
from sosp.app.run.run_folder import FILES
from sosp.nets.by_name import parse_network_name
from sosp.scoring.methods import METHODS
from sosp.studies.compare.comparison_cells import ComparisonPlan
from sosp.studies.compare.summary import list_states


def format_load_code(config: Config, path: str) -> list[str]:
    """The lines of Python that load a network."""
    source, name = parse_network_name(config.model.name)
    classes = "" if config.model.classes is None else f", classes={config.model.classes}"
    width = "" if config.model.width in (None, 1.0) else f", width={config.model.width!r}"
    home = "sosp.nets" if source == "sosp" else "sosp.nets.by_name"
    made = name if source == "sosp" else config.model.name
    return [
        "import sosp" if source == "sosp" else "import sosp, sosp.nets.by_name",
        f"original = {home}.make({made!r}{classes}{width})",
        f"model = sosp.load({path!r}, original)",
    ]


def build_section(facts: RunFacts) -> ReportSection | None:
    """Go on where it stopped, fine-tune what was pruned, load what is there."""
    config = facts.record.config
    done = [stage for stage in config.stages if stage in facts.results]
    found = [_suggest_command(facts, done)]
    if done and done[-1] in FILES:
        found.append(("Load the network", "\n".join(format_load_code(config, str(facts.folder / FILES[done[-1]])))))
    steps = tuple(step for step in found if step is not None)
    return ReportSection("next", "What to do next", (), code=steps) if steps else None


def _suggest_command(facts: RunFacts, done: list[str]) -> tuple[str, str] | None:
    folder = shlex.quote(str(facts.folder))
    if len(done) < len(facts.record.config.stages):
        return "Resume the run", f"sosp run {folder}"
    if done == ["train"]:
        return "Remove half of the computation", f"sosp prune {folder} --macs 0.5"
    if done[-1:] == ["prune"]:
        return "Fine-tune the pruned network", f"sosp finetune {folder}"
    return _suggest_pruning(facts) if done == ["compare"] else None


def _suggest_pruning(facts: RunFacts) -> tuple[str, str] | None:
    """Prune by the method that kept most at the highest ratio, of those that remove structures."""
    able = [s for s in facts.summaries if s.means and "rotation" not in METHODS[s.method].needs]
    if not able:
        return None
    mine = [s for s in able if s.ratio == max(s.ratio for s in able)]
    state = list_states(s.means for s in mine)[0]
    best = max(mine, key=lambda s: s.means.get(state, 0.0))
    words = ["sosp", "prune", *_list_arguments(facts.record.config, best.method), "--method", best.method]
    words += ["--rule", "saliency", "--ratio", f"{best.ratio:g}", "--repair" if state == "repaired" else "--no-repair"]
    return f"Prune by {best.method}, which kept the most accuracy at {best.ratio:g}", shlex.join(words)


def _list_arguments(config: Config, method: str) -> list[str]:
    """The model, the data and the choices that a method was compared with, as words of a command."""
    how, usual = (config.prune or PruningSection()).settle(), PruningSection().settle()
    groups = ComparisonPlan((method,), (0.5,), groups=how.groups).groups_for(method)
    flags = {
        "--weights": config.model.weights,
        "--width": _width(config.model.width),
        "--data": config.data.name,
        "--data-dir": config.data.folder,
        "--groups": groups,
        "--gate": how.gate if how.gate != usual.gate else None,
        "--examples": str(how.examples) if how.examples != usual.examples else None,
    }
    return [config.model.name, *(word for flag, value in flags.items() if value for word in (flag, value))]


def _width(width: float | Mapping[str, float] | None) -> str | None:
    """As the command takes it: 0.5, or layer1=2,conv1=1.5."""
    if isinstance(width, Mapping):
        return ",".join(f"{layer}={factor:g}" for layer, factor in width.items())
    return None if width in (None, 1.0) else f"{width:g}"
