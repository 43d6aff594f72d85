"""Scorers for the tests of the reward service: one that sees, one that is moody, one that looks at latents."""

import os
import time
from pathlib import Path

import numpy as np

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Provider, RewardCapabilities, Score

CRASH, HANG, RAISE = 1, 2, 3


class Sees:
    """The mean of the frames, or the sum of the latents."""

    def __init__(self, options, context):
        self.name = context.name

    def load(self):
        if Path(os.environ["NO_LOADING"]).exists():
            raise ConfigError("the weights are gone")

    def score(self, completion):
        if completion.payload is not None:
            return float(np.frombuffer(completion.payload.arrays["sample"].data, "<f4").sum())
        frames = np.frombuffer(completion.media.arrays["frames"].data, np.uint8)
        return Score(value=float(frames.mean()), details={"prompt": completion.prompt.text})


class Moody(Sees):
    """What the first byte of the frames says."""

    def score(self, completion):
        first = bytes(completion.media.arrays["frames"].data[:1])[0]
        if first == CRASH:
            os._exit(7)
        while first == HANG:
            time.sleep(0.01)
        if first == RAISE:
            raise ValueError("not in the mood")
        if first > 200:
            time.sleep((first - 200) / 10)
        return super().score(completion)


def provide(make, *kinds):
    return Provider(create=make, capabilities=RewardCapabilities(payload_kinds=frozenset(kinds)))
