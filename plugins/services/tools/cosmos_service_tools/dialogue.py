"""A dialogue of several turns, and its loop in a terminal or over a pipe."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Generator
from typing import Final

import typer

from cosmos_core.errors import CosmosError, DataError
from cosmos_core.protocols import Sampling
from cosmos_core.types import Message
from cosmos_service_tools.answers import Part, Speaker

_HELP: Final = "Ctrl-C ends an answer; /reset, /system TEXT, /exit"
_PLAIN: Final = "Each line is completed by itself ({why}); \\n in it is a line break."


class Dialogue:
    """What was said so far.

    Attributes:
        why_plain: Why what is said is text to go on from, each by itself; empty for a chat.
    """

    def __init__(
        self,
        speaker: Speaker,
        *,
        system: str | None,
        temperature: float,
        max_units: int,
        seed: int | None,
    ) -> None:
        """Begin one; raises DataError if there is a system's turn, and no place for it."""
        self._speaker: Final = speaker
        self._sampling: Final = Sampling(temperature=temperature, max_units=max_units)
        self._seed: Final = secrets.randbits(32) if seed is None else seed
        self._system = system
        self._turns: list[Message] = []
        self._number = 0
        self.why_plain: Final = speaker.why_plain or _refusal(speaker)
        self._check_system()

    def reset(self) -> None:
        """Forget what was said, but for the system's turn."""
        self._turns.clear()

    def system(self, text: str) -> None:
        """Replace the system's turn (empty: there is none), and begin anew; raises DataError as making one does."""
        before, self._system = self._system, text or None
        try:
            self._check_system()
        except DataError:
            self._system = before
            raise
        self.reset()

    def say(self, text: str) -> Generator[Part, None, None]:
        """Say something: the answer, part by part. What came of it until the iterator ends is remembered.

        An error leaves what was said before as it was.
        """
        turns = [*self._turns, Message(role="user", content=text)]
        self._number += 1
        prompt = self._speaker.encode(text.replace("\\n", "\n") if self.why_plain else self._framed(turns))
        written = ""
        try:
            for part in self._speaker.answer(prompt, self._sampling, self._seed + self._number):
                written += part.text
                yield part
        except CosmosError:
            raise
        except BaseException:
            self._turns = [*turns, Message(role="assistant", content=written)]
            raise
        self._turns = [*turns, Message(role="assistant", content=written)]

    def _framed(self, turns: list[Message]) -> list[Message]:
        return [*([] if self._system is None else [Message(role="system", content=self._system)]), *turns]

    def _check_system(self) -> None:
        if self._system is None:
            return
        if self.why_plain:
            raise DataError(
                f"there is no place for a system's turn, because each line is completed by itself: {self.why_plain}"
            )
        self._speaker.encode(self._framed([Message(role="user", content="?")]))


def _refusal(speaker: Speaker) -> str:
    try:
        speaker.encode([Message(role="user", content="?")])
    except DataError as error:
        return str(error)
    return ""


def talk(dialogue: Dialogue) -> None:
    """Talk until the end of input: with a prompt on a terminal, else a turn a line. An error ends a pipe's alone."""
    is_terminal = sys.stdin.isatty()
    if dialogue.why_plain:
        typer.echo(_PLAIN.format(why=dialogue.why_plain), err=True)
    if is_terminal:
        import readline  # noqa: F401, PLC0415 - makes lines editable; it changes the terminal where it is imported

        typer.echo(_HELP, err=True)
    while (line := _read(is_terminal=is_terminal)) is not None:
        try:
            if not _is_command(dialogue, line):
                _answer(dialogue, line)
        except CosmosError as error:
            if not is_terminal:
                raise
            typer.echo(f"cosmos: {error}", err=True)


def _read(*, is_terminal: bool) -> str | None:
    """The next line that says something; None at the end."""
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                typer.echo()
            return None
        if line == "/exit":
            return None
        if line:
            return line


def _is_command(dialogue: Dialogue, line: str) -> bool:
    """Do what a line asks of the chat, if it does."""
    command, _, rest = line.partition(" ")
    if command == "/reset":
        dialogue.reset()
    elif command == "/system":
        dialogue.system(rest.strip())
    else:
        return False
    return True


def _answer(dialogue: Dialogue, line: str) -> None:
    ended = ""
    try:
        with contextlib.closing(dialogue.say(line)) as parts:
            for part in parts:
                typer.echo(part.text, nl=False)
                ended = part.reason
    except KeyboardInterrupt:
        ended = "interrupted"
    typer.echo({"length": " […]", "interrupted": " [interrupted]"}.get(ended, ""))
