"""One sample as it grows: the model's turns and an environment's observations, in token ids that are never redone."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cosmos_core.models.tokens import tokens_payload
from cosmos_core.protocols import FinishReason, Generated, Model
from cosmos_core.rollout.episodes.recording import Recording, Turn, follow, parts_of, turn_of
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
        model: Joins what is shown: a `DialogueVision`, where something is.
        recording: The model's turns.
        said: The same in words, and what was said in between.
    """

    opening: Payload
    model: Model
    recording: Recording = attrs.field(factory=Recording)
    said: list[Message] = attrs.field(factory=list)
    _given: Payload = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._given = self.opening

    @property
    def turns(self) -> Sequence[Turn]:
        """The model's turns."""
        return self.recording.turns

    @property
    def num_units(self) -> int:
        """Units of all of it, the prompt's included."""
        return sum(len(turn.given) + len(turn.made) for turn in self.turns) + self._given.arrays["prompt"].shape[0]

    @property
    def num_decided(self) -> int:
        """Units that the model decided."""
        return self.recording.num_decided

    def add_turn(self, generated: Generated, text: str, prompt: Payload) -> list[int]:
        """Take in a turn of the model to a prompt (see `so_far`), as ids and as text; its token ids."""
        before = self.turns[-1] if self.turns else None
        turn = turn_of(generated, prompt, before, self._given)
        self.recording.add(turn)
        self._given = tokens_payload(())
        self.said.append(Message(role="assistant", content=text))
        made: list[int] = turn.made.tolist()
        return made

    def add_observation(self, encoded: Payload, said: Message) -> None:
        """Take in what the model is shown next, as the prompt of a payload and in words."""
        self.said.append(said)
        self._given = follow([self._given, encoded], self.model)

    def so_far(self) -> Payload:
        """The prompt of the next turn: everything, as it stands."""
        return follow([*parts_of(self.turns), self._given], self.model)
