"""One sample as it grows: the model's turns and an environment's observations, in token ids that are never redone."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from cosmos_core.protocols import FinishReason, Generated
from cosmos_core.rollout.episodes.recording import Recording, Turn, ids_of, turn_of, with_prompt
from cosmos_core.types import Message, Payload, SampleStatus


@attrs.frozen(kw_only=True, eq=False)
class EpisodeResult:
    """A sample as it came out of generation.

    Attributes:
        generated: All of it; of a dialogue, `num_units` counts the model's own units.
        status: OK or truncated, or what became of its environment.
        reward: The environment's own; None where it gives none.
        detail: What there is to say of its turns, or why it failed.
        said: Who said what, where others than the model did.
        text: The completion as rewards and people see it; None where it is the payload's, decoded.
    """

    generated: Generated
    status: SampleStatus
    reward: float | None = None
    detail: str = ""
    said: tuple[Message, ...] = ()
    text: str | None = None

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
        recording: The model's turns.
        said: The same in words, and what was said in between.
    """

    opening: Payload
    recording: Recording = attrs.field(factory=Recording)
    said: list[Message] = attrs.field(factory=list)
    _given: list[int] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._given = np.frombuffer(self.opening.arrays["prompt"].data, np.int32).tolist()

    @property
    def turns(self) -> Sequence[Turn]:
        """The model's turns."""
        return self.recording.turns

    @property
    def num_units(self) -> int:
        """Units of all of it, the prompt's included."""
        return sum(len(turn.given) + len(turn.made) for turn in self.turns) + len(self._given)

    @property
    def num_decided(self) -> int:
        """Units that the model decided."""
        return self.recording.num_decided

    def add_turn(self, generated: Generated, text: str) -> list[int]:
        """Take in a turn of the model, as ids and as text; its token ids."""
        before = self.turns[-1] if self.turns else None
        turn = turn_of(generated, self.opening, before, np.asarray(self._given, np.int32))
        self.recording.add(turn)
        self._given = []
        self.said.append(Message(role="assistant", content=text))
        made: list[int] = turn.made.tolist()
        return made

    def add_observation(self, ids: Sequence[int], said: Message) -> None:
        """Take in what the model is shown next, as ids and in words."""
        self.said.append(said)
        self._given += ids

    def so_far(self) -> Payload:
        """The prompt of the next turn: everything, as it stands."""
        return with_prompt(self.opening, np.concatenate([ids_of(self.turns), np.asarray(self._given, np.int32)]))

    def generated(self, reason: FinishReason, version: int) -> Generated:
        """All of it as one completion; where nothing was generated, it is of the version given."""
        return self.recording.generated(self.opening, reason, version)
