"""One sample as it grows: the model's turns and an environment's observations, in token ids that are never redone.

Shape legend: P units of the prompt, C units after it, N of these that the model decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from cosmos_core.protocols import FinishReason, Generated
from cosmos_core.types import Array, Payload, SampleStatus

_RECORDED: Final = {"logprobs": np.float32, "versions": np.int32}


@attrs.frozen(kw_only=True, eq=False)
class Played:
    """How a sample came out of generation.

    Attributes:
        generated: All of it; of a dialogue, `num_units` counts the model's own units.
        status: OK or truncated, or what became of its environment.
        reward: The environment's own; None where it gives none.
        detail: What there is to say of its turns, or why it failed.
    """

    generated: Generated
    status: SampleStatus
    reward: float | None = None
    detail: str = ""

    @staticmethod
    def single(generated: Generated) -> Played:
        """A completion of one turn."""
        is_cut = generated.reason is FinishReason.LENGTH
        return Played(generated=generated, status=SampleStatus.TRUNCATED if is_cut else SampleStatus.OK)


@attrs.define(kw_only=True, eq=False)
class Dialogue:
    """What has been said so far.

    Attributes:
        opening: What the dialogue begins with, as the model encodes it.
        tokens: Token ids after it, [C].
        decided: Which of them the model generated, [C].
        turns: What the engine made, turn by turn.
    """

    opening: Payload
    tokens: list[int] = attrs.field(factory=list)
    decided: list[bool] = attrs.field(factory=list)
    turns: list[Generated] = attrs.field(factory=list)

    @property
    def num_units(self) -> int:
        """P + C."""
        return self.opening.arrays["prompt"].shape[0] + len(self.tokens)

    @property
    def num_decided(self) -> int:
        """N."""
        return sum(self.decided)

    def add_turn(self, generated: Generated) -> list[int]:
        """Take in a turn of the model; its token ids."""
        ids = _ids(generated.payload.arrays["completion"])
        self.tokens += ids
        self.decided += [True] * len(ids)
        self.turns.append(generated)
        return ids

    def add_observation(self, ids: Sequence[int]) -> None:
        """Take in what the model is shown next."""
        self.tokens += ids
        self.decided += [False] * len(ids)

    def so_far(self) -> Payload:
        """The prompt of the next turn: everything, as it stands."""
        if not self.tokens:
            return self.opening
        prompt = _array([*_ids(self.opening.arrays["prompt"]), *self.tokens], np.int32)
        return attrs.evolve(self.opening, arrays={**self.opening.arrays, "prompt": prompt})

    def generated(self, reason: FinishReason, version: int) -> Generated:
        """All of it as one completion.

        What else the last turn's payload holds covers all units before it, too: a model's records of forwards do.

        Args:
            reason: Why it ended.
            version: Of the weights, where nothing was generated.
        """
        last = self.turns[-1].payload.arrays if self.turns else {}
        recorded = {
            name: Array(
                dtype=np.dtype(dtype).name,
                shape=(self.num_decided,),
                data=b"".join(bytes(turn.payload.arrays[name].data) for turn in self.turns),
            )
            for name, dtype in _RECORDED.items()
        }
        arrays = {
            **self.opening.arrays,
            **last,
            "prompt": self.opening.arrays["prompt"],
            "completion": _array(self.tokens, np.int32),
            "decided": _array(self.decided, np.bool_),
            **recorded,
        }
        return Generated(
            payload=attrs.evolve(self.opening, arrays=arrays),
            reason=reason,
            oldest_version=min((turn.oldest_version for turn in self.turns), default=version),
            newest_version=max((turn.newest_version for turn in self.turns), default=version),
            num_units=self.num_decided,
        )


def _ids(array: Array) -> list[int]:
    return list(memoryview(array.data).cast("B").cast("i"))


def _array(values: Sequence[int], dtype: type[np.generic]) -> Array:
    data = np.asarray(values, dtype)
    return Array(dtype=data.dtype.name, shape=data.shape, data=data.tobytes())
