"""Models that go on after what an environment answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from cosmos_core.types import Prompt


@runtime_checkable
class Conversing(Protocol):
    """A model whose completions may go on after words that are not its own: an environment's observations.

    Optional, beside `Model`. `pack` then takes payloads with `decided` (see `cosmos_core.types.Payload`).
    """

    def encode_observation(
        self, prompt: Prompt, written: Sequence[int], observation: str, *, role: str = "user"
    ) -> Sequence[int]:
        """The token ids between the end of the model's turn and its next one.

        They follow `written` as they are: nothing that was generated is ever encoded anew. What the observation spells
        is words: it never becomes a token that ends a turn or begins one, or that stands for an image.

        Args:
            prompt: What the dialogue began with; in a chat, the observation is a turn by its template.
            written: The token ids of the model's last turn, the stop token included; none before its first.
            observation: What the environment answered.
            role: Whose turn of a chat that is, if the template takes turns of that role; else it is the user's.

        Raises:
            DataError: The observation cannot be encoded.
        """
        ...
