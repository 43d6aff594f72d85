import asyncio
import contextlib
import random
import re
import sys
import time

import pytest

from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, PluginError
from cosmos_core.protocols import EnvironmentContext
from cosmos_core.types import Prompt
from cosmos_environment_textarena.plugin import TextArena, TextArenaOptions

pytest.importorskip("textarena", reason="the environment textarena needs textarena")
GUESS = {"id": "GuessTheNumber-v0", "rules": False}
NIM = {"id": "Nim-v0", "rules": False}
ROW = Prompt(text="Play.")


def made(**options):
    return TextArena(structure(options, TextArenaOptions), EnvironmentContext(name="textarena", seed=0))


def play(*turns, seed=3, **options):
    """The first words, and what became of each turn."""

    async def episode():
        environment = made(**options)
        words = await environment.reset(ROW, seed)
        found = [await environment.step(turn) for turn in turns]
        await environment.close()
        return words, found

    return asyncio.run(episode())


def test_a_game_of_one_tells_what_has_come_of_a_move_and_its_reward_at_the_end():
    words, turns = play("[5]", "Is it [7]?", "I guess 8", "[8]", **GUESS)
    assert words is None
    assert [turn.observation for turn in turns[:2]] == ["The target number is higher.\n"] * 2
    assert not any(turn.reward or turn.done for turn in turns[:2])
    assert (turns[3].done, turns[3].reward) == (True, 1.0)
    assert turns[3].detail.startswith("1: Congratulations!")
    assert "guess the number between 1 and 20 within 10 turns" in play(id="GuessTheNumber-v0")[0]
    assert "within 2 turns" in play(id="GuessTheNumber-v0", arguments={"max_turns": 2})[0]


def test_an_invalid_move_is_told_and_a_second_one_ends_the_game():
    _, (refused, over) = play("[99]", "[x]", **GUESS)
    assert (
        "You attempted an invalid move. Reason: Invalid move. Player 0 guessed a number outside" in refused.observation
    )
    assert (refused.done, refused.reward, refused.detail) == (False, 0.0, "invalid move")
    assert (over.done, over.detail[:16]) == (True, "0: Invalid Move:")
    # This game rewards how near the last guess was, whatever ends it.
    assert play("[7]", "no", "no", **GUESS)[1][-1].reward > 0.9
    assert play("[7]", "no", "no", **GUESS, invalid_reward=-1)[1][-1].reward == -1.0
    assert play("[7]", "[8]", **GUESS, invalid_reward=-1)[1][-1].reward == 1.0
    # This one gives the reason as the reward.
    with pytest.raises(PluginError, match=r"the reward of 'Countdown-v0' is no number but 'Invalid.*invalid_reward is"):
        play("no", "no", id="Countdown-v0")
    assert play("no", "no", id="Countdown-v0", invalid_reward=-1)[1][-1].reward == -1.0


def test_only_the_last_line_is_the_move_if_the_recipe_says_so():
    thought = "If I take [1] it is too low.\n[8]\n"
    assert play(thought, **GUESS)[1][0].observation == "The target number is higher.\n"
    assert play(thought, **GUESS, last_line=True)[1][0].reward == 1.0
    assert play("", **GUESS, last_line=True)[1][0].detail == "invalid move"


def test_a_random_opponent_makes_moves_that_the_game_takes_and_the_seed_decides_which():
    moves = [f"[{cell}]" for cell in range(9)]
    ends = set()
    for seed in range(12):
        options = {"id": "TicTacToe-v0", "rules": False, "opponent": "random", "player": seed % 2}
        given = {} if seed % 3 else {"moves": moves}
        words, turns = play(*moves[:4], seed=seed, **options, **given)
        assert play(*moves[:4], seed=seed, **options, **given) == (words, turns)
        assert ("[Player 0]" in words) == (seed % 2 == 1)
        told = words + "".join(turn.observation for turn in turns)
        assert f"Player {1 - seed % 2} attempted an invalid move" not in told
        ends |= {turn.reward for turn in turns if turn.done}
    # The second invalid move of the model ends a game, too.
    assert {-1.0} <= ends <= {-1.0, 0.0, 1.0}
    with pytest.raises(PluginError, match=r"moves: 'Nim-v0' takes none of the opponent's 2 moves \(\[.*give those"):
        play("[0 1]", **NIM, opponent="random")
    with pytest.raises(PluginError, match=r"takes none of the opponent's 1 moves \(pass\)"):
        play("[0 1]", **NIM, opponent="script", moves=["pass"])


def test_a_scripted_opponent_makes_its_moves_in_order():
    _, turns = play(*["[0 1]"] * 3, **NIM, opponent="script", moves=["[2 2]", "[1 1]", "[0 9]"])
    told = [re.findall(r"\[Player 1\] (.*)", turn.observation) for turn in turns]
    assert told == [["[2 2]"], ["[1 1]"], ["[2 2]"]]


def test_other_games_and_whoever_draws_change_nothing():
    options = {"id": "TicTacToe-v0", "rules": False, "opponent": "random", "player": 1}
    moves = ["[1]", "[4]", "[6]"]
    alone = [play(*moves, **options, seed=seed) for seed in range(12)]
    assert len({words for words, _ in alone}) > 2

    async def among():
        games = [made(**options) for _ in alone]
        words = await asyncio.gather(*(game.reset(ROW, seed) for seed, game in enumerate(games)))
        turns = []
        for move in moves:
            random.seed(5)
            turns.append(await asyncio.gather(*(game.step(move) for game in games)))
        return list(zip(words, map(list, zip(*turns, strict=True)), strict=True))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert asyncio.run(among()) == alone
    finally:
        sys.setswitchinterval(interval)
    before = random.getstate()
    play("[3]", **GUESS)
    assert random.getstate() == before


def test_the_event_loop_goes_on_while_a_game_takes_its_time(monkeypatch):
    environment = made(**GUESS)

    async def episode():
        await environment.reset(ROW, 0)
        monkeypatch.setattr(environment._game.env, "step", lambda action: time.sleep(0.5) or (False, {}))
        began = time.monotonic()
        answer = asyncio.ensure_future(environment.step("[1]"))
        await asyncio.sleep(0.05)
        assert time.monotonic() - began < 0.4
        return await answer

    assert not asyncio.run(episode()).done


def test_games_that_cannot_be_played_are_refused_with_the_reason(monkeypatch, tmp_path, subtests):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    for options, why in [
        ({"id": "Nimm-v0"}, "textarena has no game 'Nimm-v0'; did you mean Nim-v0"),
        ({"id": "xyz"}, "textarena has no game 'xyz'; see textarena.pprint_registry_detailed"),
        ({"id": "Debate-v0"}, "'Debate-v0' asks a model of OpenRouter, which is not available"),
        ({"id": "Hangman-v0"}, "data of nltk .* downloads nothing: python -m nltk.downloader words$"),
        ({"id": "SpellingBee-v0-small"}, "python -m nltk.downloader words$"),
        ({"id": "Wordle-v0"}, "python -m nltk.downloader words averaged_perceptron_tagger_eng$"),
        ({"id": "Nim-v0"}, "opponent: None, and 'Nim-v0' is no game of one .*opponents that are models, are not"),
        ({"id": "QuantumTicTacToe-v0"}, "is no game of one;"),
        ({"id": "GermanWhist-v0"}, r"is no game of one \(German Whist is a two-player game only\);"),
        ({"id": "UsedCar-v0-balanced"}, "textarena cannot make 'UsedCar-v0-balanced': ImportError"),
        ({"id": "Snake-v0", "opponent": "random"}, "opponent: 'random', and 'Snake-v0' is no game of two"),
        ({**GUESS, "opponent": "random"}, "'GuessTheNumber-v0' is no game of two"),
        ({**GUESS, "arguments": {"colour": "red"}}, "textarena cannot make .*TypeError: .*colour"),
        ({**NIM, "moves": ["[0 1]"]}, "`moves` and `player` are of games of two; set `opponent`"),
        ({**NIM, "player": 1}, "`moves` and `player` are of games of two; set `opponent`"),
        ({**NIM, "opponent": "script"}, "there are no `moves`; give them"),
        ({**NIM, "opponent": "minimax"}, "opponent"),
        ({**NIM, "player": 2}, "player"),
    ]:
        with subtests.test(options=options), pytest.raises(ConfigError, match=why):
            play(**options)
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    made(id="Hangman-v0")
    with pytest.raises(ConfigError, match=r"nltk\.downloader averaged_perceptron_tagger_eng$"):
        made(id="Wordle-v0")


@pytest.mark.nightly
def test_every_game_answers_garbled_moves_or_says_why_it_cannot_be_played(subtests):
    from textarena.envs.registration import ENV_REGISTRY

    turns = ("[1]", "", "[0 1]", "[" + "9" * 5000 + "]", "\x00[A1 B2]")
    played, first = [], {spec.entry_point: name for name, spec in reversed(ENV_REGISTRY.items())}
    for name in first.values():
        for options in ({}, {"opponent": "random"}):
            # TextArena 0.7.4 lacks the files of one.
            impossible = contextlib.suppress(ConfigError, PluginError, FileNotFoundError)
            with subtests.test(name=name, options=options), impossible:
                asyncio.run(as_long_as_it_goes(made(id=name, **options), turns))
                played.append(name)
    assert len(played) > 45


async def as_long_as_it_goes(environment, turns):
    await environment.reset(ROW, 3)
    for turn in turns:
        if (await environment.step(turn)).done:
            break


def test_the_package_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"pip install 'cosmos-environment-textarena\[library\]'"):
        made(**GUESS)
