"""Text is printed as it is: no markup, no broken paths, no control characters."""

import io

import pytest
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightningrl.cli.console import make_console, say


def said(text: str, *, terminal: bool, width: int = 40) -> list[str]:
    out = io.StringIO()
    say(Console(file=out, force_terminal=terminal, color_system=None, width=width), ("hint: ", "yellow"), text)
    return out.getvalue().splitlines()


def test_square_brackets_are_not_markup(capsys) -> None:
    console = make_console(stderr=False)
    table = Table(title="pip [title]", box=None)
    table.add_row('pip install "lightningrl[train]"')
    console.print(table)
    console.print("routes=[bold]")
    say(console, "agent [/] said: [red]")
    shown = capsys.readouterr().out
    assert all(
        text in shown for text in ("pip [title]", '"lightningrl[train]"', "routes=[bold]", "agent [/] said: [red]")
    )


def test_control_characters_are_shown_as_symbols(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console(stderr=False)
    hostile = "\x1b]0;renamed\x07 \x1b[2J \x9b2J"
    table = Table(box=None)
    table.add_row(hostile)
    console.print(table)
    console.print(Panel(Text(hostile)))
    say(console, ("error: ", "bold red"), hostile)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
    assert shown.count("␛[2J") == 3


def test_in_a_terminal_lines_break_at_spaces_only() -> None:
    command = "lightningrl train runs/a-folder-with-a-very-long-name-of-its-own/config.toml --run-dir runs/x --resume"
    lines = said(f"go on with: {command}", terminal=True)
    assert len(lines) > 2
    assert " ".join(line.strip() for line in lines) == f"hint: go on with: {command}"


def test_in_a_pipe_a_message_is_one_line() -> None:
    assert len(said("word " * 40, terminal=False)) == 1
