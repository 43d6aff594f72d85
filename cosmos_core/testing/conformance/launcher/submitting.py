"""Tests of what a launcher hands over to a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import LauncherCapabilities, LauncherContext, Provider, Submission, Submitting
from cosmos_core.testing.conformance.launcher.processes import LauncherProcesses
from cosmos_core.testing.conformance.plugin import fault

_ODD_NAMES = ("two words", "it's", "$(touch odd)", 'say "x"', "a;b", "line\nbreak")


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

        assert submission.text, "the plain name was rendered"
        given: Any = structure(options, provider.options, "launch.options")
        for name in _ODD_NAMES:
            odd = attrs.evolve(context, name=name, directory=context.directory.parent / name)
            try:
                text = provider.create(given, odd).render().text
            except ConfigError:
                continue
            bare = [line for line in text.splitlines() if f" {odd.directory}" in f" {line}" and _is_bare(line, odd)]
            if bare:
                fault(f"the run's folder {str(odd.directory)!r} is not quoted in the line {bare[0]!r}")


def _is_bare(line: str, context: LauncherContext) -> bool:
    """Whether a line has the folder outside of any quotes."""
    before = line.partition(str(context.directory))[0]
    return before.count("'") % 2 == 0 and before.count('"') % 2 == 0
