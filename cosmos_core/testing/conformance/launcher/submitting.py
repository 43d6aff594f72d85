"""Tests of what a launcher hands over to a scheduler."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, Final

import attrs
import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import LauncherCapabilities, LauncherContext, Provider, Submission, Submitting
from cosmos_core.testing.conformance.launcher.processes import LauncherProcesses
from cosmos_core.testing.conformance.plugin import fault

_ODD_NAMES: Final = ("two words", "it's", "$(touch odd)", "`touch odd`", 'say "x"', "a;b", "line\nbreak")
_DATA: Final = (".yaml", ".yml", ".json")
"""Ends of the names of files that no shell reads."""


class LauncherSubmissions(LauncherProcesses):
    """Rendering; nothing is submitted."""

    @pytest.fixture
    def submission(self, make: Callable[..., Any], capabilities: LauncherCapabilities) -> Submission:
        """What would be submitted."""
        if not capabilities.submits:
            pytest.skip("it starts processes where cosmos run is, and hands nothing over")
        rendered = make().render()
        if not isinstance(rendered, Submission):
            fault(f"render() returned {rendered!r}, which is no Submission")
        return rendered

    def test_elsewhere_it_says_where_it_starts_processes(self, make: Callable[..., Any]) -> None:
        """`cosmos run` asks before anything is made: no run begins that could not start."""
        try:
            make().check()
        except ConfigError as error:
            if not str(error).strip():
                fault("check() refused without a word; say from where processes can be started")
        except Exception as error:  # noqa: BLE001 - the plugin's, which is what is tested
            fault(f"check() raised {type(error).__name__}: {error}; refuse with a ConfigError")

    def test_it_submits_what_it_declares(self, make: Callable[..., Any], capabilities: LauncherCapabilities) -> None:
        """`cosmos launch` takes those that submit, `cosmos run` looks for GPUs on this machine for others."""
        if capabilities.submits != isinstance(make(), Submitting):
            has = "lacks" if capabilities.submits else "has"
            fault(f"it declares submits={capabilities.submits} and {has} render(), ready() and submit()")

    def test_rendering_is_repeatable_and_changes_nothing(
        self, submission: Submission, make: Callable[..., Any], context: LauncherContext
    ) -> None:
        """What `--render-only` shows is what would be submitted, and showing it leaves nothing behind."""
        if make().render() != submission:
            fault("render() gave another submission the second time; write what options and context say, alone")
        if context.directory.parent.exists():
            fault(f"render() wrote into {context.directory.parent}; the run's folder is made when it is submitted")

    def test_a_submission_finds_the_run(self, submission: Submission, context: LauncherContext) -> None:
        """What runs elsewhere has nothing to go by but what was submitted."""
        if not submission.name or "/" in submission.name:
            fault(f"the submission's file is named {submission.name!r}; give a plain name, such as job.sh")
        if str(context.directory) not in submission.text:
            fault(f"the submission does not mention the run's folder {context.directory}")

    def test_odd_names_are_quoted_or_refused(
        self, submission: Submission, provider: Provider[Any], options: Any, context: LauncherContext
    ) -> None:
        """A run's name and folder are people's words: what a shell would make of them must not happen."""
        from cosmos_core.config.structure import structure  # noqa: PLC0415 - only here

        given: Any = structure(options, provider.options, "launch.options")
        for name in _ODD_NAMES:
            odd = attrs.evolve(context, name=name, directory=context.directory.parent / name)
            try:
                text = provider.create(given, odd).render().text
            except ConfigError:
                continue
            if submission.name.endswith(_DATA):
                _check_data(text, str(odd.directory))
            else:
                _check_shell(submission.text, str(context.directory), text, str(odd.directory))


def _check_data(text: str, folder: str) -> None:
    """Refuse data, such as YAML, with the folder outside of quotes, or with a line break of it."""
    bare = [line for line in text.splitlines() if f" {folder}" in f" {line}" and _is_bare(line, folder)]
    if bare or ("\n" in folder and folder in text):
        fault(f"the run's folder {folder!r} is not quoted in the line {(bare or [folder])[0]!r}")


def _is_bare(line: str, folder: str) -> bool:
    before = line.partition(folder)[0]
    return before.count("'") % 2 == 0 and before.count('"') % 2 == 0


def _check_shell(plain: str, plain_folder: str, odd: str, odd_folder: str) -> None:
    """Refuse a script of which a shell reads other words for a folder of an odd name than for one of a plain name.

    Args:
        plain: The script of a run with a plain name.
        plain_folder: The folder of that run.
        odd: The script of the same run with an odd name.
        odd_folder: The folder of that one.
    """
    # In double quotes, $ and ` mean what they mean outside: those are no quotes for a name that has one.
    kinds = ("'\"", "'") if set(odd_folder) & set("$`") else ("'\"",)
    for quotes in kinds:
        before = _words(plain, quotes)
        if before is None:
            continue
        after = _words(odd, quotes)
        wanted = [word.replace(plain_folder, odd_folder) for word in before if plain_folder in word]
        got = [word for word in after or () if odd_folder in word]
        if after is None or len(after) != len(before) or got != wanted:
            lines = [line for line in odd.splitlines() if odd_folder.split("\n", maxsplit=1)[0] in line]
            fault(f"the run's folder {odd_folder!r} is not quoted in the line {(lines or [''])[-1]!r}")


def _words(script: str, quotes: str) -> list[str] | None:
    """The words of a script, but its comments, where these characters quote; None if a quotation does not end."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.quotes = quotes
    try:
        return list(lexer)
    except ValueError:
        return None
