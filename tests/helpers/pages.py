"""Read the code blocks of a page of documentation, and run them as a reader would.

A comment in the line above a block says what is special about it; every other block is run as it stands.

<!-- given: model, loader -->   these names stand for the reader's own: see ``GIVEN``
<!-- needs: timm -->            packages that may be missing: the block is then skipped, and the test says so
<!-- file: net.py -->           not run but written to this file, for the blocks that follow
<!-- not run: why -->           for the one reason that is stated; files that it names must exist
"""

import importlib.util
import os
import re
import runpy
import shlex
import socket
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import sosp
from helpers.commands import call
from sosp.core.layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
RUN = ("python", "sh")  # languages
SHOWN = ("text", "toml", "bibtex", "json")  # not run, because there is nothing to run
NOTES = ("given", "needs", "file", "not run")
FENCE = re.compile(r"^( *)```(\S*) *$")
NOTE = re.compile(r"^ *<!-- (given|needs|file|not run): (.+) -->$")


@dataclass(frozen=True)
class Block:
    """A piece of code in a page."""

    page: str  # path from the root of the repository
    line: int  # of its first line of code, from 1
    language: str
    code: str
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def skipped(self) -> str | None:
        """Why it is not run here, if it is not."""
        if "not run" in self.notes:
            return self.notes["not run"]
        missing = [name for name in listed(self.notes.get("needs", "")) if importlib.util.find_spec(name) is None]
        return f"{', '.join(missing)} is not installed" if missing else None


def listed(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def pages(patterns: Iterable[str]) -> list[str]:
    """The pages that there are, as paths from the root."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page, with the notes in the lines right above it."""
    found: list[Block] = []
    notes: dict[str, str] = {}
    opened: Block | None = None
    indent, lines = "", []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if opened is not None and fence and not fence[2]:
            found.append(replace(opened, code="\n".join(lines)))
            opened, notes = None, {}
        elif opened is not None:
            lines.append(line.removeprefix(indent))
        elif fence:
            opened, indent, lines = Block(page, number + 1, fence[2], "", notes), fence[1], []
        elif note := NOTE.match(line):
            notes[note[1]] = note[2]
        elif line.strip():
            notes = {}
    assert opened is None, f"{page}: the block at line {opened.line if opened else 0} is not closed"
    return found


# --- running --------------------------------------------------------------------------------------------


def run_page(page: str) -> int:
    """Run the blocks of a page in order, in the current folder, in one namespace; how many were run."""
    names: dict[str, Any] = {"__name__": "page"}
    done = 0
    with same_tables(sosp.METHODS, LAYERS):
        for block in blocks(page):
            if "file" in block.notes:
                Path(block.notes["file"]).write_text(block.code + "\n", encoding="utf-8")
            elif block.language in RUN and block.skipped is None:
                run_block(block, names)
                done += 1
    return done


@contextmanager
def same_tables(*tables: dict[Any, Any]) -> Iterator[None]:
    """What a page adds to them is gone afterwards."""
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)


def run_block(block: Block, names: dict[str, Any]) -> None:
    names.update({name: GIVEN[name]() for name in listed(block.notes.get("given", ""))})
    with warnings.catch_warnings():
        if "needs" in block.notes:
            warnings.simplefilter("ignore")  # of other packages
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.code  # so that a traceback names the line of the page
            exec(compile(code, block.page, "exec"), names)
            return
        for line in block.code.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                run_command(block, words)


def run_command(block: Block, words: list[str]) -> None:
    assert words[0] in PROGRAMS, f"{block.place}: nobody knows how to run {words[0]!r} here"
    PROGRAMS[words[0]](block, words[1:])


def run_sosp(block: Block, words: list[str]) -> None:
    found = call(*words)
    assert found.exit_code == 0, f"{block.place}: sosp {' '.join(words)}\n{found.output}"


def run_make(block: Block, words: list[str]) -> None:
    """Only that there is such a target: what it does is tested elsewhere, or is this very test."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [w for w in words if "=" not in w and w not in targets] == [], block.place


def run_pip(block: Block, words: list[str]) -> None:
    """Only that the extras are there: a test installs nothing."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [extra for word in words for group in re.findall(r"\[(.*)\]", word) for extra in group.split(",")]
    assert [extra for extra in asked if extra not in extras] == [], block.place


def run_torchrun(block: Block, words: list[str]) -> None:
    """As a single process, this one: what several do together is tested elsewhere."""
    _, _, *rest = words  # --nproc-per-node K
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with mock.patch.dict(os.environ, alone):
        if rest[:2] == ["-m", "sosp"]:
            run_sosp(block, rest[2:])
        else:
            runpy.run_path(rest[0], run_name="__main__")


PROGRAMS: dict[str, Callable[[Block, list[str]], None]] = {
    "sosp": run_sosp,
    "make": run_make,
    "pip": run_pip,
    "torchrun": run_torchrun,
}


# --- what stands for the reader's own -------------------------------------------------------------------


@cache
def digits() -> Any:
    return sosp.data.digits()


@cache
def trained() -> torch.nn.Module:
    torch.manual_seed(0)
    schedule = replace(sosp.SCHEDULES["digits"], epochs=2)
    return sosp.train(sosp.nets.digits_resnet(width=0.5), digits(), schedule).model


def loader() -> list[Any]:
    return list(digits().train.ordered(batch=100, limit=300))


GIVEN: dict[str, Callable[[], Any]] = {
    "model": trained,
    "data": digits,
    "loader": loader,
    "example": lambda: loader()[0][0][:4],
    "sosp": lambda: sosp,
    "torch": lambda: torch,
}
