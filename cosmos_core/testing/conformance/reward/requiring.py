"""What rewards say that a machine lacks: nothing where they score, and what `load` would refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cosmos_core.errors import CosmosError
from cosmos_core.protocols import Loading, Requiring
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.reward.subject import RewardSubject
from cosmos_core.testing.conformance.reward.workers import WorkerRun


class RewardRequiring(RewardSubject):
    """The optional `absent`, which planning asks of a reward that it never loads."""

    def test_it_lacks_nothing_where_it_scores(self, sound_run: WorkerRun, make: Callable[..., Any]) -> None:  # noqa: ARG002 - a condition
        """No run starts where a reward lacks something."""
        told = _told(make())
        if told:
            fault(f"`absent` says {told!r}, where a worker has scored; return '' where nothing is absent")

    def test_it_says_what_is_absent(self, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """What planning says beforehand must be what ends the run otherwise."""
        if not self.variables:
            pytest.skip("not given: `variables`, those of the environment that it needs")
        for name in self.variables:
            monkeypatch.delenv(name, raising=False)
        reward = make()
        told = _told(reward)
        unnamed = [name for name in self.variables if name not in told]
        if unnamed:
            fault(f"`absent` says {told!r} without {', '.join(unnamed)} in the environment; name what to set")
        if not isinstance(reward, Loading):
            return
        try:
            reward.load()
        except CosmosError:
            return
        except Exception as error:  # noqa: BLE001 - which error it is, is what is tested
            fault(f"`absent` says {told!r}, and `load` raised {type(error).__name__} ({error}); raise a ConfigError")
        fault(f"`absent` says {told!r}, but `load` returned; let both say the same")


def _told(reward: Any) -> str:
    if not isinstance(reward, Requiring):
        pytest.skip("not there: `absent`")
    told: Any = reward.absent()
    if not isinstance(told, str):
        fault(f"`absent` returned {told!r:.100}; return a str, empty where nothing is absent")
    return told
