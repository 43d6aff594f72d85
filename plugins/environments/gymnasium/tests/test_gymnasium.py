import asyncio
import base64
import builtins
import contextlib
import io
import threading
import time

import numpy as np
import pytest
from PIL import Image

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import EnvironmentContext
from cosmos_core.types import Message, Prompt
from cosmos_environment_gymnasium.plugin import Gymnasium, GymnasiumOptions

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


def test_numbers_outside_of_the_space_are_no_actions(subtests):
    for text in ["7", "-1", "1.5", "1 2", "one", "1e999"]:
        with subtests.test(text=text):
            _, (turn,) = play(text, **{**ICE, "actions": ()})
            assert turn.observation == "no action: Discrete(4)\n"
            assert play("I take 2", **{**ICE, "actions": ()})[1][0].observation == "field 1\n"


def test_a_box_takes_as_many_numbers_as_it_has():
    words, (turn, bad) = play("torque 0.5", "0.5 0.5", id="Pendulum-v1", digits=3)
    assert len(words.split()) == len(turn.observation.split()) == 3
    assert turn.reward < 0
    assert bad.detail == "no action"


class Recorded:
    """What every environment of these tests did, and in which thread."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.events, self.threads = [], set()

    def note(self, event):
        self.events.append(event)
        self.threads.add(threading.get_ident())


@pytest.fixture
def recorded(monkeypatch):
    """`gymnasium.make` makes environments that take their time; the argument `space` is that of their actions."""
    import gymnasium

    seen = Recorded()

    class Slow(gymnasium.Env):
        metadata = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012 - gymnasium's own

        def __init__(self, space, making_s, stepping_s, frame):
            seen.note("making")
            time.sleep(making_s)
            seen.note("made")
            self.action_space, self.stepping_s, self.frame = space, stepping_s, frame

        def reset(self, *, seed=None, options=None):
            seen.note("reset")
            return 0, {}

        def step(self, action):
            seen.note("stepping")
            time.sleep(self.stepping_s)
            seen.note("stepped")
            seen.action = action
            return 1, 0.0, False, False, {}

        def render(self):
            seen.note("rendered")
            if isinstance(self.frame, Exception):
                raise self.frame
            return self.frame

        def close(self):
            seen.note("closed")

    def make(name, *, space=None, making_s=0.0, stepping_s=0.0, frame=None, render_mode=None):
        seen.render_mode = render_mode
        return Slow(SPACES(gymnasium.spaces)[name] if space is None else space, making_s, stepping_s, frame)

    monkeypatch.setattr(gymnasium, "make", make)
    return seen


def SPACES(spaces):  # noqa: N802 - a table
    return {
        "discrete": spaces.Discrete(3, start=-1),
        "bytes": spaces.Box(0, 255, (1,), np.uint8),
        "bits": spaces.MultiBinary(1),
        "counts": spaces.MultiDiscrete([3]),
        "real": spaces.Box(-1.0, 1.0, (), np.float32),
        "unbounded": spaces.Box(-np.inf, np.inf, (), np.float32),
        "whole": spaces.Box(0, 9, (), np.int16),
        "long": spaces.Box(-(1 << 62), 1 << 62, (1,), np.int64),
        "pair": spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
    }


def test_every_space_takes_what_it_contains_and_no_number_more(recorded, subtests):
    for name, bad, good, action in [
        ("discrete", ["2", "-2", "9" * 30], "-1", -1),
        ("bytes", ["-1", "300", "256"], "255", [255]),
        ("bits", ["257", "2", "-1"], "1", [1]),
        ("counts", ["3", "-1"], "2", [2]),
        ("real", ["1.5", "-2"], "-0.75", -0.75),
        ("unbounded", ["1e300", "9" * 400], "0.5", 0.5),
        ("whole", ["1.5", "70000", "10"], "9", 9),
        ("long", ["9300000000000000000", "-1e30"], "7", [7]),
    ]:
        with subtests.test(name=name, bad=bad, good=good, action=action):
            recorded.clear()
            _, (*refused, taken) = play(*bad, good, id=name)
            assert [turn.detail for turn in refused] == ["no action"] * len(bad)
            assert taken.observation == "1\n"
            assert recorded.action == pytest.approx(np.asarray(action))
            assert recorded.events.count("stepped") == 1


def test_actions_that_no_names_or_numbers_can_say_are_refused_when_it_is_made(recorded):
    assert play("c", id="discrete", actions=("a", "b", "c"))[1][0].observation == "1\n"
    assert recorded.action == 1
    with pytest.raises(ConfigError, match=r"environment\.options\.actions: 4 names .* 'discrete' are Discrete\(3"):
        play(id="discrete", actions=("a", "b", "c", "d"))
    with pytest.raises(ConfigError, match=r"environment\.options\.actions: 1 names .* Box"):
        play(id="real", actions=("a",))
    with pytest.raises(ConfigError, match=r"environment\.options\.id: the actions of 'pair', Tuple.*, are no fixed"):
        play(id="pair")


def test_what_nobody_waits_for_is_closed_once_it_is_done_and_by_the_thread_that_made_it(recorded, subtests):
    for slow, events in [
        ("making_s", ["making", "made", "reset", "closed"]),
        ("stepping_s", ["making", "made", "reset", "stepping", "stepped", "closed"]),
    ]:
        with subtests.test(slow=slow, events=events):
            recorded.clear()

            async def episode(slow=slow):
                options = GymnasiumOptions(id="discrete", arguments={slow: 0.6})
                environment = Gymnasium(options, EnvironmentContext(name="gymnasium", seed=0))
                late = 0.05 if slow == "making_s" else 5
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(environment.reset(Prompt(text="Play."), 0), late)
                    await asyncio.wait_for(environment.step("1"), 0.05)
                # Nor does anybody wait for its end.
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(environment.close(), 0.05)
                await asyncio.to_thread(environment._thread.shutdown)

            asyncio.run(episode())
            assert recorded.events == events
            assert len(recorded.threads) == 1


def test_what_it_renders_is_shown_with_each_observation(recorded):
    frame = np.full((30, 60, 3), (250, 20, 20), np.uint8)
    more = {"render": True, "observation": "now\n"}
    words, (fly, moved) = play("fly", "1", id="discrete", arguments={"frame": frame}, render_side=20, **more)
    assert recorded.render_mode == "rgb_array"
    assert recorded.events == ["making", "made", "reset", "rendered", "stepping", "stepped", "rendered", "closed"]
    assert len(recorded.threads) == 1
    assert (words, moved.observation) == (Message(role="user", content="now\n", media=moved.media), "now\n")
    assert fly.media == (), "nothing has changed"
    (location,) = moved.media
    image = Image.open(io.BytesIO(base64.b64decode(location.removeprefix("data:image/png;base64,"))))
    assert (image.format, image.size, image.getpixel((19, 9))) == ("PNG", (20, 10), (250, 20, 20))
    for wrong, why in [
        (None, r"it gives NoneType, no array of colours; its render modes: human, rgb_array"),
        (frame[..., 0], r"it gives ndarray, no array"),
        (ImportError("no pygame"), r"ImportError: no pygame; set render = false"),
    ]:
        with pytest.raises(ConfigError, match=r"environment\.options\.render: 'discrete' cannot.*" + why):
            play(id="discrete", arguments={"frame": wrong}, **more)
    with pytest.raises(ConfigError, match=r"arguments\.render_mode: 'human', but render = true takes 'rgb_array'"):
        play(id="discrete", arguments={"render_mode": "human"}, **more)


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
    with pytest.raises(ConfigError, match=r"pip install gymnasium"):
        play(id="CartPole-v1")
