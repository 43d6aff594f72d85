"""Environments in the workers of a run: they answer what is ordinary, in time, and disturb nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from cosmos_core.testing.conformance.environment.dialogues import Script, shown
from cosmos_core.testing.conformance.environment.hosting import Hosted
from cosmos_core.testing.conformance.environment.subject import EnvironmentSubject
from cosmos_core.testing.conformance.environment.workers import Transcript, WorkerRun
from cosmos_core.testing.conformance.plugin import fault

_BLOCKED_S: Final = 2.0
_SHOWN: Final = 3


class EnvironmentConduct(EnvironmentSubject):
    """What an environment may do, and may not."""

    def test_every_ordinary_dialogue_goes_its_way(self, worker_run: WorkerRun, scripts: Sequence[Script]) -> None:
        """A garbled turn gets an answer that says so, or ends the dialogue; raising is for what cannot go on."""
        failed = [
            f"{shown(script)}: {transcript.failed.detail}"
            for script, transcript in _played(worker_run, scripts)
            if transcript.failed is not None and not transcript.failed.timed_out
        ]
        if failed:
            listed = "".join(f"\n  {each}" for each in failed[:_SHOWN])
            fault(f"{len(failed)} of {len(scripts)} ordinary dialogues failed:{listed}")

    def test_it_answers_in_time(self, worker_run: WorkerRun, scripts: Sequence[Script]) -> None:
        """A run waits `timeout_s` of the recipe for an answer, then gives the sample up."""
        for script, transcript in _played(worker_run, scripts):
            if transcript.failed is not None and transcript.failed.timed_out:
                fault(
                    f"{shown(script)} got no answer within {self.timeout_s:g} s; be quicker, "
                    "or set `timeout_s` of the test class to what recipes must give it"
                )

    def test_it_leaves_no_process_behind(self, worker_run: WorkerRun) -> None:
        """A worker may be ended at any time, and what it started must not outlive it."""
        if worker_run.leftovers:
            listed = "".join(f"\n  {each}" for each in worker_run.leftovers[:_SHOWN])
            fault(f"it starts processes that outlive the worker; end them in `close`:{listed}")

    def test_it_never_blocks_the_event_loop(self, hosted: Hosted) -> None:
        """All dialogues of a worker share it."""
        if hosted.blocked_s > _BLOCKED_S:
            fault(
                f"{hosted.where} held up the event loop, and all other dialogues of the worker, for "
                f"{hosted.blocked_s:.1f} s; put what blocks into `await asyncio.to_thread(…)`"
            )

    def test_nothing_goes_on_after_close(self, hosted: Hosted) -> None:
        """A worker has thousands of dialogues in its life."""
        if hosted.left:
            fault(f"tasks go on after `close`: {', '.join(hosted.left[:_SHOWN])}; cancel them and wait for their end")

    def test_it_changes_nothing_that_it_is_given(self, hosted: Hosted) -> None:
        """Rewards and the other samples of the group see the same row."""
        if hosted.changed:
            fault(f"{hosted.changed[0]} changed its row; work on a copy")

    def test_dialogues_do_not_disturb_each_other(
        self, sound_run: WorkerRun, scripts: Sequence[Script], request: pytest.FixtureRequest
    ) -> None:
        """A worker has many at once."""
        self.needs_determinism(request)
        both = request.getfixturevalue("in_worker")(scripts, at_once=True)
        for script, alone, among in zip(scripts, sound_run.transcripts, both.transcripts, strict=True):
            if alone is not None and among is not None and alone.said != among.said:
                fault(
                    f"{shown(script)} got {among.said!r:.200} among others, and {alone.said!r:.200} alone; keep the "
                    "state of a dialogue in its own instance"
                )

    def needs_determinism(self, request: pytest.FixtureRequest) -> None:
        """Skip the test unless the environment declares that its answers can be had again."""
        if not request.getfixturevalue("capabilities").deterministic:
            pytest.skip("not declared: deterministic")


def _played(run: WorkerRun, scripts: Sequence[Script]) -> list[tuple[Script, Transcript]]:
    pairs = zip(scripts, run.transcripts, strict=True)
    return [(script, transcript) for script, transcript in pairs if transcript is not None]
