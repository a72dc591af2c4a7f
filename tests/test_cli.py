"""The command line: its surface, its exit codes, and that a refusal is one line."""

import sys

import pytest
import typer

import sosp
from sosp import cli, demo


def exit_code(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """What ``sosp WORDS...`` exits with."""
    monkeypatch.setattr(sys, "argv", ["sosp", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def failing(error: BaseException):
    def run(console: object) -> None:
        raise error

    return run


def test_the_surface_is_frozen() -> None:
    command = typer.main.get_command(cli.app)
    assert sorted(command.commands) == ["demo"]
    assert [option.opts for option in command.params] == [["--version"]]
    assert command.commands["demo"].params == []


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"sosp {sosp.__version__}\n"


@pytest.mark.parametrize("words", [("--help",), ("demo", "--help")])
def test_help(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, *words) == 0
    assert "demo" in capsys.readouterr().out


def test_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "prun") == 2
    assert "prun" in capsys.readouterr().err


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "layer 'conv[1]' " + "cannot be pruned, " * 12 + "exclude it"
    monkeypatch.setattr(demo, "run", failing(sosp.errors.SospError(words)))
    assert exit_code(monkeypatch, "demo") == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"sosp: {words}\n")


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", failing(KeyboardInterrupt()))
    assert exit_code(monkeypatch, "demo") == 130


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", failing(ZeroDivisionError("ours")))
    monkeypatch.setattr(sys, "argv", ["sosp", "demo"])
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main()
