from __future__ import annotations

import numpy as np
import pytest

from cosmos_core.errors import EngineError
from cosmos_core.rollout.serving.scoring import scoring_inputs
from cosmos_core.types import Array, Payload


def ids(values, dtype="int32"):
    return Array(dtype=dtype, shape=np.shape(values), data=np.asarray(values, dtype).tobytes())


def payload(kind="tokens", **changes):
    arrays = {"prompt": ids([1, 2]), "completion": ids([3, 4, 9]), **changes}
    return Payload(kind=kind, arrays={name: array for name, array in arrays.items() if array is not None})


def score(*payloads):
    return scoring_inputs(payloads, object(), context_length=6, vocabulary=10)


def test_a_completion_is_scored_behind_its_prompt():
    (given,) = score(payload())
    assert (given.tokens, given.num_given, list(given.decided_N)) == ([1, 2, 3, 4, 9], 2, [0, 1, 2])
    assert list(given.prompt.arrays) == ["prompt"]


def test_what_cannot_be_scored_is_refused_by_its_place():
    for changed, message in [
        ({"prompt": ids([1, 10])}, "token ids 1 to 10 of its prompt do not fit a vocabulary of 10"),
        ({"completion": ids([-1, 3])}, "token ids -1 to 3 of its completion do not fit a vocabulary of 10"),
        ({"completion": None}, "an int32 'completion' of one dim; the kind is 'tokens', the array none"),
        ({"completion": ids([3], "int64")}, r"an int32 'completion' of one dim; .* the array int64 \[1\]"),
        ({"prompt": ids([[1, 2]])}, r"an int32 'prompt' of one dim; .* the array int32 \[1, 2\]"),
        ({"kind": "latents"}, "payloads of kind 'tokens' .* the kind is 'latents'"),
        ({"prompt": ids([])}, "a prompt of 0 and a completion of 3 units: a prompt is needed, and at most 6"),
        ({"prompt": ids([1, 2, 3, 4])}, "a prompt of 4 and a completion of 3 units"),
    ]:
        with pytest.raises(EngineError, match=rf"payload 1 to score: .*{message}"):
            score(payload(), payload(**changed))
