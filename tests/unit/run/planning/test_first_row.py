import time

import numpy as np
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import RewardCapabilities, Score
from cosmos_core.run.planning import first_row
from cosmos_core.run.planning.first_row import look_at_first
from cosmos_core.types import Array, Payload, Prompt


class Model:
    def encode(self, prompt):
        ids = np.arange(len(prompt.text), dtype=np.int64)
        return Payload(kind="tokens", arrays={"prompt": Array(dtype="int64", shape=ids.shape, data=ids.tobytes())})

    def prompt_text(self, payload):
        return f"<user>{payload.arrays['prompt'].shape[0]}"


class Dataset:
    def row(self, split, index):
        if index == 0:
            raise DataError("a bad row")
        return Prompt(text="3+4=", demonstration="7", reference=7)


class Right:
    def score(self, completion):
        return Score(value=float(completion.text == "7"))


class Awaited:
    async def score(self, completion):
        if completion.text != "7":
            raise ValueError("no number")
        return 0.5


class Broken:
    def score(self, completion):
        return 1 / 0


class Leaving:
    def score(self, completion):
        raise SystemExit(3)


class Hanging:
    def score(self, completion):
        time.sleep(1.0)


class Loading(Broken):
    def load(self):
        """Its scores need weights."""


def look(*rewards, kinds=("tokens",)):
    capable = RewardCapabilities(payload_kinds=frozenset(kinds))
    configs = [(RewardConfig(plugin=type(each).__name__, timeout_s=0.4), capable, each) for each in rewards]
    return look_at_first(Model(), Dataset(), configs, 10)


def test_the_first_usable_row_is_rendered_and_scored():
    first = look(Right(), Awaited(), Loading())
    assert (first.shown, first.num_units, first.good) == ("<user>4", 4, ("demonstration", "7"))
    right, awaited = first.trials
    assert (right.good.value, right.wrong.value, awaited.good.value, awaited.wrong.value) == (1.0, 0.0, 0.5, None)
    assert "ValueError: no number" in awaited.wrong.detail
    assert look(Broken(), kinds=["media"]).trials == ()


def test_a_reward_that_scores_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"reward Broken: it scores neither '7' nor .* ZeroDivisionError"):
        look(Broken())
    with pytest.raises(ConfigError, match=r"reward Leaving: it scores neither .* SystemExit: 3"):
        look(Leaving())
    with pytest.raises(ConfigError, match=r"reward Hanging: it scores neither .* no score within 0.4 s"):
        look(Hanging())


def test_a_reward_that_is_waited_for_is_named(monkeypatch, capsys):
    monkeypatch.setattr(first_row, "_SILENT_S", 0.05)
    with pytest.raises(ConfigError, match=r"reward Hanging: it scores neither .* no score within 0.4 s"):
        look(Hanging())
    look(Right())
    assert capsys.readouterr().out == "waiting for reward Hanging, for at most 0.4 s\n" * 2


def test_without_a_usable_row_there_is_nothing_to_show():
    assert look_at_first(Model(), Dataset(), [], 1) is None
