import asyncio
import builtins

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import EnvironmentContext
from cosmos_core.rollout.environments.gymnasium import Gymnasium, GymnasiumOptions
from cosmos_core.types import Prompt

pytest.importorskip("gymnasium", reason="the environment gymnasium needs gymnasium")
pytestmark = pytest.mark.filterwarnings("ignore:.*render_mode.*", "ignore::DeprecationWarning")


def play(*turns, seed=3, **options):
    """The first words, and what became of each turn."""

    async def episode():
        environment = Gymnasium(GymnasiumOptions(**options), EnvironmentContext(name="gymnasium", seed=0))
        words = await environment.reset(Prompt(text="Play."), seed)
        found = [await environment.step(turn) for turn in turns]
        await environment.close()
        return words, found

    return asyncio.run(episode())


ICE = {
    "id": "FrozenLake-v1",
    "arguments": {"is_slippery": False},
    "actions": ("left", "down", "right", "up"),
    "observation": "field {observation}\n",
}


def test_named_actions_lead_to_the_goal_and_its_reward():
    words, turns = play("right", "Right", "Down it is:\ndown", "down", "down", "right", **ICE)
    assert words == "field 0\n"
    assert [turn.observation for turn in turns] == [f"field {number}\n" for number in (1, 2, 6, 10, 14, 15)]
    assert [turn.done for turn in turns] == [False] * 5 + [True]
    assert [turn.reward for turn in turns] == [0.0] * 5 + [1.0]


def test_what_is_no_action_is_told_and_changes_nothing():
    _, (fly, empty, right) = play("fly", "", "right", invalid_reward=-0.1, **ICE)
    assert fly.observation == empty.observation == "no action: one of left, down, right, up\n"
    assert (fly.reward, fly.done) == (-0.1, False)
    assert right.observation == "field 1\n"


@pytest.mark.parametrize("text", ["7", "-1", "1.5", "1 2", "one", "1e999"])
def test_numbers_outside_of_the_space_are_no_actions(text):
    _, (turn,) = play(text, **{**ICE, "actions": ()})
    assert turn.observation == "no action: Discrete(4)\n"
    assert play("I take 2", **{**ICE, "actions": ()})[1][0].observation == "field 1\n"


def test_a_box_takes_as_many_numbers_as_it_has():
    words, (turn, bad) = play("torque 0.5", "0.5 0.5", id="Pendulum-v1", digits=3)
    assert len(words.split()) == len(turn.observation.split()) == 3
    assert turn.reward < 0
    assert bad.detail == "no action"


def test_the_seed_decides_how_it_begins():
    first, second, other = (play(id="CartPole-v1", seed=seed)[0] for seed in (1 << 62, 1 << 62, 4))
    assert first == second != other
    assert all(len(value.strip("-0.").split("e")[0]) <= 5 for value in first.split())


def test_what_cannot_be_made_says_why(monkeypatch):
    with pytest.raises(ConfigError, match=r"environment\.options\.id: gymnasium cannot make 'Nowhere-v0'"):
        play(id="Nowhere-v0")
    with pytest.raises(ConfigError, match=r"does not show the \{observation\}"):
        play(id="CartPole-v1", observation="see")
    real = builtins.__import__

    def without(name, *rest):
        if name == "gymnasium":
            raise ImportError("No module named 'gymnasium'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r'pip install "cosmos-core\[gymnasium\]"'):
        play(id="CartPole-v1")
