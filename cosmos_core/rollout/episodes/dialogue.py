"""One sample as it grows: the model's turns and an environment's observations, in token ids that are never redone.

Shape legend: P units of the prompt, C units after it, N of these that the model decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from cosmos_core.protocols import FinishReason, Generated
from cosmos_core.types import Array, Message, Payload, SampleStatus

_RECORDED: Final = {"logprobs": np.float32, "versions": np.int32}
"""What an engine says of each unit that it generated."""


@attrs.frozen(kw_only=True, eq=False)
class EpisodeResult:
    """A sample as it came out of generation.

    Attributes:
        generated: All of it; of a dialogue, `num_units` counts the model's own units.
        status: OK or truncated, or what became of its environment.
        reward: The environment's own; None where it gives none.
        detail: What there is to say of its turns, or why it failed.
        said: Who said what, where others than the model did.
    """

    generated: Generated
    status: SampleStatus
    reward: float | None = None
    detail: str = ""
    said: tuple[Message, ...] = ()

    @staticmethod
    def single(generated: Generated) -> EpisodeResult:
        """A completion of one turn."""
        is_cut = generated.reason is FinishReason.LENGTH
        return EpisodeResult(generated=generated, status=SampleStatus.TRUNCATED if is_cut else SampleStatus.OK)


@attrs.define(kw_only=True, eq=False)
class Dialogue:
    """A dialogue as it stands.

    Attributes:
        opening: What the dialogue begins with, as the model encodes it.
        tokens: Token ids after it, [C].
        decided: Which of them the model generated, [C].
        turns: What the engine made, turn by turn.
        said: The same in words, and what was said in between.
    """

    opening: Payload
    tokens: list[int] = attrs.field(factory=list)
    decided: list[bool] = attrs.field(factory=list)
    turns: list[Generated] = attrs.field(factory=list)
    said: list[Message] = attrs.field(factory=list)

    @property
    def num_units(self) -> int:
        """P + C."""
        return self.opening.arrays["prompt"].shape[0] + len(self.tokens)

    @property
    def num_decided(self) -> int:
        """N."""
        return sum(self.decided)

    def add_turn(self, generated: Generated, text: str) -> list[int]:
        """Take in a turn of the model, as ids and as text; its token ids."""
        ids = _ids(generated.payload.arrays["completion"])
        self.tokens += ids
        self.decided += [True] * len(ids)
        self.turns.append(generated)
        self.said.append(Message(role="assistant", content=text))
        return ids

    def add_observation(self, ids: Sequence[int], said: Message) -> None:
        """Take in what the model is shown next, as ids and in words."""
        self.said.append(said)
        self.tokens += ids
        self.decided += [False] * len(ids)

    def so_far(self) -> Payload:
        """The prompt of the next turn: everything, as it stands."""
        return extended(self.opening, self.tokens)

    def generated(self, reason: FinishReason, version: int) -> Generated:
        """All of it as one completion; where nothing was generated, it is of the version given.

        What a model's forwards recorded of a unit is that of the first turn in which it went through one: the forward
        that priced the unit after it, if that is the model's own. Later turns recorded it anew, perhaps under other
        weights.
        """
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
            **self._records(),
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

    def _records(self) -> dict[str, Array]:
        """Records of forwards, by name: rows of all units but the last."""
        turns = [turn.payload.arrays for turn in self.turns]
        known = {*self.opening.arrays, "prompt", "completion", *_RECORDED}
        names = [name for name in turns[-1] if name not in known] if turns else []
        return {name: _rows([each[name] for each in turns]) for name in names}


def extended(prompt: Payload, ids: Sequence[int]) -> Payload:
    """A prompt that goes on with these token ids."""
    if not ids:
        return prompt
    whole = _array([*_ids(prompt.arrays["prompt"]), *ids], np.int32)
    return attrs.evolve(prompt, arrays={**prompt.arrays, "prompt": whole})


def _rows(arrays: Sequence[Array]) -> Array:
    """Rows of a growing sequence, each from the first array that has it."""
    last, data, num_rows = arrays[-1], bytearray(), 0
    for array in arrays:
        row_size = array.nbytes // max(array.shape[0], 1)
        data += memoryview(array.data).cast("B")[num_rows * row_size :]
        num_rows = array.shape[0]
    return attrs.evolve(last, data=bytes(data))


def _ids(array: Array) -> list[int]:
    return list(memoryview(array.data).cast("B").cast("i"))


def _array(values: Sequence[int], dtype: type[np.generic]) -> Array:
    data = np.asarray(values, dtype)
    return Array(dtype=data.dtype.name, shape=data.shape, data=data.tobytes())
