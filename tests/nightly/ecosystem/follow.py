"""Follows a page of the documentation to the letter: writes the files that it shows, runs the commands that it gives.

    python -m tests.nightly.ecosystem.follow docs/plugins/tutorial.md FOLDER

A `console` block holds commands, each after `$ `, and below a command what it prints: `...` on a line of its own stands
for any lines, within a line for any text. A `code-block` with a `:caption:` is a file at that path, in the folder in
which the commands are by then. A block below a line `% by hand` is left to people. All of it runs in one bash session
that ends at the first command that fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import attrs

_BLOCK: Final = re.compile(
    r"^(?P<skipped>% by hand\n+)?```(?P<kind>console|\{code-block\} ?\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_CAPTION: Final = re.compile(r"\A(?::\w+:.*\n)*?:caption: (?P<path>.+)\n(?::\w+:.*\n)*\n*")
_PROMPT: Final = "$ "
_ANY: Final = "..."
_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")
_SHOWN_LINES: Final = 40


class NotAsWrittenError(Exception):
    """What the page says does not hold; the message begins with the page and the line."""


@attrs.frozen(kw_only=True)
class File:
    """A file that the page shows: its path, its text, and the page's line."""

    line: int
    path: str
    text: str


@attrs.frozen(kw_only=True)
class Command:
    """A command of the page, what the page says it prints (None: nothing is said), and the page's line."""

    line: int
    text: str
    printed: tuple[str, ...] | None


Step: TypeAlias = File | Command


def follow(page: Path, folder: Path, environment: Mapping[str, str], *, timeout_s: float) -> None:
    """Do what a page says.

    Args:
        page: A Markdown page.
        folder: Where to begin; an empty folder.
        environment: The variables of the session; nothing else is inherited.
        timeout_s: Longest time for all of it.

    Raises:
        NotAsWrittenError: A command failed, printed something else, or took too long.
    """
    perform(page, steps(page.read_text(encoding="utf-8")), folder, environment, timeout_s=timeout_s)


def perform(
    page: Path, todo: Sequence[Step], folder: Path, environment: Mapping[str, str], *, timeout_s: float
) -> None:
    """Do these steps of a page; arguments and errors are those of `follow`."""
    if not todo:
        raise NotAsWrittenError(f"{page}: there is nothing to follow")
    mark = secrets.token_hex(8)
    printed, failure = _run(_script(todo, mark), folder, environment, timeout_s)
    _check(page, todo, printed.split(mark)[1:], failure)


def _run(script: str, folder: Path, environment: Mapping[str, str], timeout_s: float) -> tuple[str, str]:
    """What a session printed, without colours, and why it failed (or empty). What it has started ends with it."""
    with tempfile.TemporaryFile() as output:
        session = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = session.wait(timeout_s)
            failure = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"all of it took longer than {timeout_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session.pid, signal.SIGKILL)
            session.wait()
        output.seek(0)
        return _COLOUR.sub("", output.read().decode(errors="replace")), failure


def steps(text: str) -> list[Step]:
    """What a page says to do, in order."""
    found: list[Step] = []
    for block in _BLOCK.finditer(text):
        if block["skipped"]:
            continue
        line = text.count("\n", 0, block.start("body")) + 1
        if block["kind"] == "console":
            found += _commands(block["body"], line)
        elif caption := _CAPTION.match(block["body"]):
            found.append(File(line=line, path=caption["path"].strip(), text=block["body"][caption.end() :]))
    return found


def _commands(body: str, first: int) -> Iterator[Command]:
    command, line, printed = "", first, list[str]()
    for number, text in enumerate(body.splitlines(), first):
        if not text.startswith(_PROMPT):
            printed.append(text)
            continue
        if command:
            yield Command(line=line, text=command, printed=tuple(printed) or None)
        command, line, printed = text.removeprefix(_PROMPT), number, []
    if command:
        yield Command(line=line, text=command, printed=tuple(printed) or None)


def _script(todo: Sequence[Step], mark: str) -> str:
    """One session; before each step it prints the mark, so that what each step prints can be told apart."""
    parts = ["set -euo pipefail"]
    for step in todo:
        parts.append(f"printf %s {mark}")
        if isinstance(step, Command):
            parts.append(step.text)
        else:
            path = shlex.quote(step.path)
            parts += [f'mkdir -p "$(dirname {path})"', f"printf %s {shlex.quote(step.text)} > {path}"]
    return "\n".join(parts)


def _check(page: Path, todo: Sequence[Step], outputs: Sequence[str], failure: str) -> None:
    for number, (step, output) in enumerate(zip(todo, outputs, strict=False), 1):
        what = f"$ {step.text}" if isinstance(step, Command) else f"the file {step.path}"
        place = f"{page}:{step.line}: {what}"
        if failure and number == len(outputs):
            raise NotAsWrittenError(f"{place}\n{failure}; it printed:\n{_tail(output)}")
        if isinstance(step, Command) and step.printed is not None and not _is_as_written(step.printed, output):
            written = "\n".join(step.printed)
            raise NotAsWrittenError(f"{place}\nthe page says that it prints:\n{written}\nit printed:\n{_tail(output)}")
    if failure:
        raise NotAsWrittenError(f"{page}: {failure}")


def _is_as_written(printed: Sequence[str], output: str) -> bool:
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == _ANY else re.escape(line.rstrip()).replace(re.escape(_ANY), ".*") + r"[ \t]*\n"
        for line in printed
    )
    return re.fullmatch(pattern, output.rstrip() + "\n") is not None


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_SHOWN_LINES:])


if __name__ == "__main__":
    follow(Path(sys.argv[1]), Path(sys.argv[2]), os.environ, timeout_s=1800.0)
