"""What rewards say of prompts before a run: nothing against one that they score."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, Reward, Vetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.reward.completions import shown
from cosmos_core.testing.conformance.reward.scoring import attempt
from cosmos_core.testing.conformance.reward.subject import RewardSubject


class RewardVetting(RewardSubject):
    """The optional `vet`, which planning asks about the first rows of a dataset."""

    def test_what_it_scores_passes_its_vetting(self, reward: Reward, completions: Sequence[Completion]) -> None:
        """Rows that it refuses count as unusable, and a run whose rows all are is not started."""
        for completion in (*completions, *(each for each, _ in self.examples)):
            error = _refusal(reward, completion)
            if error is not None:
                fault(f"`vet` refuses the prompt of {shown(completion)}, which gets a score: {error}")

    def test_what_its_vetting_refuses_cannot_be_scored(self, reward: Reward) -> None:
        """A run goes by `score`; what planning says beforehand must be the same."""
        for completion in self.unscorable:
            error = _refusal(reward, completion)
            if error is None:
                continue
            if not isinstance(error, DataError) or not str(error).strip():
                kind = type(error).__name__
                fault(
                    f"`vet` raised {kind} ({error}) for the prompt of {shown(completion)}; raise a DataError saying why"
                )
            if not isinstance(attempt(reward, completion), Exception):
                fault(f"`vet` refuses the prompt of {shown(completion)}, but `score` returned; let both say the same")


def _refusal(reward: Reward, completion: Completion) -> Exception | None:
    if not isinstance(reward, Vetting):
        pytest.skip("not there: `vet`")
    try:
        reward.vet(completion.prompt)
    except Exception as error:  # noqa: BLE001 - which error it is, is what is tested
        return error
    return None
