"""What to do next: the commands and the lines of Python that go on from a run."""

from __future__ import annotations

import shlex

from sosp.config import Config
from sosp.models import parse
from sosp.report.facts import Facts
from sosp.report.section import Section
from sosp.runs import FILES


def loading(config: Config, path: str) -> list[str]:
    """The lines of Python that load a network."""
    source, name = parse(config.model.name)
    classes = "" if config.model.classes is None else f", classes={config.model.classes}"
    width = "" if config.model.width in (None, 1.0) else f", width={config.model.width!r}"
    home = "sosp.nets" if source == "sosp" else "sosp.models"
    made = name if source == "sosp" else config.model.name
    return [
        "import sosp" if source == "sosp" else "import sosp, sosp.models",
        f"original = {home}.make({made!r}{classes}{width})",
        f"model = sosp.load({path!r}, original)",
    ]


def section(facts: Facts) -> Section | None:
    """Go on where it stopped, fine-tune what was pruned, load what is there."""
    config = facts.record.config
    done = [stage for stage in config.stages if stage in facts.results]
    found = [_onwards(facts, done)]
    if done and done[-1] in FILES:
        found.append(("Load the network", "\n".join(loading(config, str(facts.folder / FILES[done[-1]])))))
    steps = tuple(step for step in found if step is not None)
    return Section("next", "What to do next", (), code=steps) if steps else None


def _onwards(facts: Facts, done: list[str]) -> tuple[str, str] | None:
    folder = shlex.quote(str(facts.folder))
    if len(done) < len(facts.record.config.stages):
        return "Go on where it stopped", f"sosp run {folder}"
    if done == ["train"]:
        return "Remove half of the computation", f"sosp prune {folder} --macs 0.5"
    if done[-1:] == ["prune"]:
        return "Fine-tune: nothing was trained after the cut", f"sosp finetune {folder}"
    return _winner(facts) if done == ["compare"] else None


def _winner(facts: Facts) -> tuple[str, str] | None:
    """Prune by the method that kept most at the highest ratio."""
    last = max((s.ratio for s in facts.summaries if s.means), default=None)
    if last is None:
        return None
    mine = [s for s in facts.summaries if s.ratio == last and s.means]
    state = "tuned" if any("tuned" in s.means for s in mine) else "recalibrated"
    best = max(mine, key=lambda s: s.means.get(state, 0.0))
    model, data = facts.record.config.model, facts.record.config.data
    flags = {"--weights": model.weights, "--data": data.name, "--data-dir": data.folder}
    words = ["sosp", "prune", model.name, *(x for flag, value in flags.items() if value for x in (flag, value))]
    command = shlex.join([*words, "--method", best.method, "--ratio", f"{best.ratio:g}"])
    return f"Prune by {best.method}, which kept most at {best.ratio:g}", command
