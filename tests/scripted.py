"""Turns of a script, in place of an engine's."""

import numpy as np

from cosmos_core.models.tokens import array_of, token_array
from cosmos_core.protocols import FinishReason, Generated
from cosmos_core.types import Payload


class Handle:
    """Has its samples from the beginning, or gets them."""

    def __init__(self, request, samples=None):
        self.request, self.samples, self.callbacks = request, samples, []

    def result(self, timeout_s=None):
        return self.samples

    def add_done_callback(self, callback):
        callback(self) if self.samples is not None else self.callbacks.append(callback)

    def finish(self, samples):
        self.samples = samples
        for callback in self.callbacks:
            callback(self)


def generated(request, ids, *, is_whole, version, number):
    """The turn with these ids: a unit's log-prob is its id, negative, and of all but the last `number` is recorded."""
    arrays = {
        **request.prompt.arrays,
        "completion": token_array(ids),
        "logprobs": array_of(np.float32([-each for each in ids])),
        "versions": token_array([version] * len(ids)),
        "routing": token_array([number] * (request.prompt.arrays["prompt"].shape[0] + len(ids) - 1)),
    }
    return Generated(
        payload=Payload(kind="tokens", arrays=arrays),
        reason=FinishReason.STOP if is_whole else FinishReason.LENGTH,
        oldest_version=version,
        newest_version=version,
        num_units=len(ids),
    )
