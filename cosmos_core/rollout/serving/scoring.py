"""Sequences to score: completions that someone else may have generated.

Shape legend: C units of a completion, N of these that a model decided, all unless it is a dialogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from cosmos_core.errors import EngineError
from cosmos_core.protocols import Model
from cosmos_core.protocols.model import MoEModel
from cosmos_core.protocols.vision import Conditioning
from cosmos_core.rollout.serving.tokens import check_ids, condition
from cosmos_core.types import Array, Payload

_GENERATED: Final = frozenset({"completion", "decided", "logprobs", "turn_rewards", "turns", "versions"})


@attrs.frozen(kw_only=True, eq=False)
class ScoringInput:
    """A sequence to score.

    Attributes:
        prompt: What it begins with, by itself; of a dialogue that shows something, up to the last of that at least.
        tokens: All of it.
        num_given: Leading tokens that are only conditioned on, at least 1: the prompt.
        decided_N: Which tokens after these are scored, rising.
        conditioning: How the prompt enters, where the tokens do not say it all.
    """

    prompt: Payload
    tokens: Sequence[int]
    num_given: int
    decided_N: Sequence[int]
    conditioning: Conditioning | None = None


def scoring_inputs(
    payloads: Sequence[Payload], model: Model, *, context_length: int, vocabulary: int
) -> list[ScoringInput]:
    """Read what is to be scored out of payloads: prompts with completions.

    Raises:
        EngineError: One has no prompt or no completion, is too long, has ids outside the vocabulary, shows what the
            model cannot enter, or does not say of each unit whether it was decided.
    """
    return [_given(payload, index, model, context_length, vocabulary) for index, payload in enumerate(payloads)]


def _given(payload: Payload, index: int, model: Model, context_length: int, vocabulary: int) -> ScoringInput:
    where = f"payload {index} to score"
    prompt = check_ids(payload, "prompt", where, vocabulary).tolist()
    completion = check_ids(payload, "completion", where, vocabulary).tolist()
    if not prompt or len(prompt) + len(completion) > context_length:
        raise EngineError(
            f"{where}: a prompt of {len(prompt)} and a completion of {len(completion)} units: a prompt is needed, "
            f"and at most {context_length} units in all"
        )
    begins = _prompt_of(payload, model)
    if (kinds := payload.arrays.get("kinds")) is not None and len(kinds.shape) == 1 and kinds.shape[0] > len(prompt):
        # What an environment shows is entered with the prompt.
        ids = np.asarray((prompt + completion)[: kinds.shape[0]], np.int32)
        whole = Array(dtype="int32", shape=ids.shape, data=ids.tobytes())
        begins = attrs.evolve(begins, arrays={**begins.arrays, "prompt": whole})
    conditioning = condition(begins, model, where)
    return ScoringInput(
        prompt=begins,
        tokens=prompt + completion,
        num_given=len(prompt),
        decided_N=_decided(payload, len(completion), where),
        conditioning=conditioning,
    )


def _decided(payload: Payload, size: int, where: str) -> Sequence[int]:
    """Places of the completion that the model decided: all, unless the payload says otherwise."""
    told = payload.arrays.get("decided")
    if told is None:
        return range(size)
    if told.dtype != "bool" or told.shape != (size,):
        raise EngineError(
            f"{where}: `decided` is {told.dtype} {list(told.shape)} of a completion of {size} units; it is one bool a "
            "unit"
        )
    return [int(place) for place in np.flatnonzero(np.frombuffer(told.data, np.bool_))]


def _prompt_of(payload: Payload, model: Model) -> Payload:
    """The prompt of a completion: without what an engine added to it."""
    records = {record.name for record in model.records()} if isinstance(model, MoEModel) else set()
    kept = {name: array for name, array in payload.arrays.items() if name not in _GENERATED | records}
    return attrs.evolve(payload, arrays=kept)
