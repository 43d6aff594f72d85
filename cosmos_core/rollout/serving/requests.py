"""What a request must be to enter the engine, and how its prompt enters the model."""

from __future__ import annotations

import numpy as np

from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import Conditioned, Conditioning, Model, Request
from cosmos_core.types import Payload


def check_request(request: Request, *, context_length: int, vocabulary: int) -> None:
    """Refuse what cannot be generated.

    Raises:
        EngineError: Names the request, the value seen and what is allowed.
    """
    where = f"request {request.request_id!r}"
    ids = check_ids(request.prompt, "prompt", where, vocabulary)
    if len(ids) == 0:
        raise EngineError(f"{where}: the prompt is empty; it needs one token at least")
    sampling = request.sampling
    if sampling.max_units < 1 or len(ids) + sampling.max_units > context_length:
        raise EngineError(
            f"{where}: a prompt of {len(ids)} and a completion of up to {sampling.max_units} units do not fit the "
            f"context length of {context_length}"
        )
    if sampling.num_samples < 1 or (sampling.temperature == 0 and sampling.num_samples != 1):
        raise EngineError(f"{where}: {sampling.num_samples} samples at temperature {sampling.temperature}")
    proper = sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0
    if not proper:
        raise EngineError(
            f"{where}: temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k} are not a "
            "way to draw (temperature >= 0, 0 < top_p <= 1, top_k >= 0)"
        )


def check_ids(payload: Payload, name: str, where: str, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Token ids of a payload, int32 [N].

    Args:
        payload: Of kind `tokens`.
        name: Of the array.
        where: What the payload is of, for errors.
        vocabulary: Ids are below it.

    Raises:
        EngineError: There is no such array of int32, or an id is outside the vocabulary.
    """
    array = payload.arrays.get(name)
    if payload.kind != "tokens" or array is None or array.dtype != "int32" or len(array.shape) != 1:
        found = "none" if array is None else f"{array.dtype} {list(array.shape)}"
        raise EngineError(
            f"{where}: this engine takes payloads of kind 'tokens' with an int32 {name!r} of one dim; the kind is "
            f"{payload.kind!r}, the array {found}"
        )
    ids = np.frombuffer(array.data, np.int32)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
        raise EngineError(
            f"{where}: token ids {ids.min()} to {ids.max()} of its {name} do not fit a vocabulary of {vocabulary}"
        )
    return ids


def condition(prompt: Payload, model: Model, where: str) -> Conditioning | None:
    """How a prompt enters; None where its token ids say it all.

    Raises:
        EngineError: It holds what the model cannot enter.
    """
    if isinstance(model, Conditioned):
        try:
            return model.condition(prompt)
        except DataError as error:
            raise EngineError(f"{where}: {error}") from error
    if more := sorted(prompt.arrays.keys() - {"prompt"}):
        raise EngineError(
            f"{where}: its prompt has the arrays {', '.join(more)}, and {type(model).__name__} does not say how they "
            "enter a forward (cosmos_core.protocols.Conditioned)"
        )
    return None
