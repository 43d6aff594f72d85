"""What environments answer: the same to the same, rewards where they are declared, and what is promised."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cosmos_core.protocols import EnvironmentCapabilities
from cosmos_core.testing.conformance.environment.conduct import EnvironmentConduct
from cosmos_core.testing.conformance.environment.dialogues import Script, shown
from cosmos_core.testing.conformance.environment.plan import refusals
from cosmos_core.testing.conformance.environment.subject import PlayInWorker
from cosmos_core.testing.conformance.environment.workers import WorkerRun
from cosmos_core.testing.conformance.plugin import fault


class EnvironmentAnswers(EnvironmentConduct):
    """What an answer is."""

    def test_another_process_gives_the_same_answers(
        self, sound_run: WorkerRun, scripts: Sequence[Script], in_worker: PlayInWorker, request: pytest.FixtureRequest
    ) -> None:
        """Each replica has workers of its own, and the samples of a group are to be comparable."""
        self.needs_determinism(request)
        other = in_worker(list(reversed(scripts)), hash_seed="1")
        for script, one, two in zip(scripts, sound_run.transcripts, reversed(other.transcripts), strict=True):
            if one is not None and two is not None and one.said != two.said:
                fault(
                    f"{shown(script)} got {one.said!r:.200} in one process and {two.said!r:.200} in another, after "
                    "other dialogues and with another hash seed; draw from the seed that `reset` is given, or declare "
                    "EnvironmentCapabilities(deterministic=False)"
                )

    def test_rewards_are_declared(
        self, capabilities: EnvironmentCapabilities, sound_run: WorkerRun, scripts: Sequence[Script]
    ) -> None:
        """What is not declared is not counted."""
        if capabilities.rewards:
            return
        for script, transcript in zip(scripts, sound_run.transcripts, strict=True):
            given = [each.reward for each in transcript.answers if each.reward] if transcript is not None else []
            if given:
                fault(
                    f"{shown(script)} got a reward of {given[0]:g}, which no run would count; declare "
                    "EnvironmentCapabilities(rewards=True)"
                )

    def test_the_examples_get_their_answers(self, in_worker: PlayInWorker) -> None:
        """What its documentation promises."""
        if not self.examples:
            pytest.skip("not given: `examples`, dialogues with the observations that they must get")
        scripts = [Script(prompt=prompt, turns=tuple(turns)) for prompt, turns, _ in self.examples]
        run = in_worker(scripts)
        for script, transcript, (_, _, expected) in zip(scripts, run.transcripts, self.examples, strict=True):
            if transcript is None or transcript.failed is not None:
                why = "another example took too long" if transcript is None else str(transcript.failed)
                fault(f"{shown(script)} has no answers: {why}")
            found = [each.observation for each in transcript.answers]
            if found != list(expected):
                fault(f"{shown(script)} got {found!r:.300}, and `examples` says {list(expected)!r:.300}")

    def test_planning_refuses_to_count_rewards_that_are_not_declared(
        self, capabilities: EnvironmentCapabilities
    ) -> None:
        """A recipe that weighs them is refused before it starts."""
        refused = refusals(self.plugin, capabilities, weight=1.0)
        if capabilities.rewards and refused:
            fault(f"it declares rewards, but planning refuses them: {refused[0]}")
        if not capabilities.rewards and not refused:
            fault("planning counts rewards that are not declared: a fault of cosmos-core")
