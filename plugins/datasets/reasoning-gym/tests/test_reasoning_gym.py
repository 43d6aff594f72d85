"""The kits do not know of these: what splits share, what is refused and in which words, and where answers are."""

from collections import Counter
from pathlib import Path

import attrs
import pytest

from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, DatasetContext, RewardContext
from cosmos_core.types import Message
from cosmos_dataset_reasoning_gym.dataset import ReasoningGym, ReasoningGymOptions
from cosmos_dataset_reasoning_gym.library import _FORMULAS, _LISTS, entry_as_json
from cosmos_dataset_reasoning_gym.reward import ScoreOptions, VerifierReward

SMALL = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
EIGHT = {"question": "7 + 5 - 4 =", "answer": "8", "metadata": {}}


def made(seed=0, **options):
    given = structure({"task": "chain_sum", **options}, ReasoningGymOptions, "dataset.options")
    return ReasoningGym(given, DatasetContext(seed=seed, directory=Path()))


def rows(dataset, split):
    return [dataset.row(split, index) for index in range(dataset.size(split))]


def score(row, text, **options):
    reward = VerifierReward(ScoreOptions(**options), RewardContext(name="verified", seed=0))
    return reward.score(Completion(prompt=row, text=text))


def test_splits_share_no_question_in_any_run():
    """There are 200 questions, 0 + 0 to 9 - 9: nearly all are drawn, many again and again."""
    drawn = [made(seed, config=SMALL, train_rows=1000, heldout_rows=300) for seed in (0, 1)]
    train, heldout = ({row.text for each in drawn for row in rows(each, split)} for split in ("train", "heldout"))
    assert len(train | heldout) > 190
    assert len(heldout) == pytest.approx(0.2 * 200, abs=15)
    assert not train & heldout


def test_runs_with_neighbouring_seeds_share_no_entries():
    """The library draws entry 7 of seed 0 and entry 6 of seed 1 from the same number."""
    long = {"min_terms": 6, "min_digits": 4}
    first, second = ({row.text for row in rows(made(seed, config=long, train_rows=500), "train")} for seed in (0, 1))
    assert len(first) == len(second) == 500
    assert not first & second


def test_weights_of_a_mixture_are_shares_of_rows():
    tasks = [{"task": "lcm", "weight": 3}, {"task": "gcd", "weight": 1, "config": {"max_value": 9}}]
    found = rows(made(task=None, tasks=tasks, train_rows=1000), "train")
    assert Counter(row.metadata["part"] for row in found)["lcm"] == pytest.approx(750, abs=50)
    assert {row.reference["config"].get("max_value") for row in found} == {None, 9}


def test_rows_are_what_the_options_say():
    row = made(prompt="Q: {question}", chat=True, system="Be brief.", demonstration="A: {answer}").row("train", 0)
    question, answer = row.reference["entry"]["question"], row.reference["entry"]["answer"]
    assert row.text == (
        Message(role="system", content="Be brief."),
        Message(role="user", content=f"Q: {question}"),
    )
    assert row.demonstration == f"A: {answer}"
    assert made(task="graph_color").row("train", 0).demonstration is None
    careless = [row.demonstration for row in rows(made(careless=0.5, guess="1000", demonstration="{answer}"), "train")]
    assert careless.count("1000") == pytest.approx(1000, abs=100)


def test_a_demonstration_gets_the_whole_score(subtests):
    for task in [
        "chain_sum",
        "countdown",
        "letter_counting",
        "maze",
        "syllogism",
        "simple_equations",
        *sorted(_FORMULAS | _LISTS),
    ]:
        with subtests.test(task=task):
            for row in rows(made(task=task, train_rows=10, heldout_rows=0), "train"):
                assert score(row, row.demonstration).value == 1.0


def test_where_answers_are(subtests):
    row = attrs.evolve(made().row("train", 0), reference={"task": "chain_sum", "config": {}, "entry": EIGHT})
    for text, options, value in [
        ("so\n8\n \n", {"answer": "last-line"}, 1.0),
        ("8\nno, 9", {"answer": "last-line"}, 0.0),
        ("", {"answer": "last-line"}, 0.0),
        ("8 or 9", {"answer": "last-line", "partial": False}, 0.0),
        ("x = 9, x = 8", {"answer": "pattern", "pattern": r"x = (\d+)"}, 1.0),
        ("x = 9, x = 8", {"answer": "pattern", "pattern": r"\d+"}, 1.0),
        ("none", {"answer": "pattern", "pattern": r"x = (\d+)"}, 0.0),
        ("x", {"answer": "pattern", "pattern": r"x(\d+)?"}, 0.0),
    ]:
        with subtests.test(text=text, options=options):
            assert score(row, text, **options).value == value
    with pytest.raises(DataError, match=r"reward verified: the reference '8' has no task, config and entry"):
        score(attrs.evolve(row, reference="8"), "8")


def test_no_answer_is_run_as_a_program(subtests, tmp_path):
    run = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    for task, cheat in [
        ("countdown", "S.One.__class__"),
        ("puzzle24", "N(24).evalf()"),
        ("simple_integration", "Integral(x, x)"),
        ("intermediate_integration", "Symbol('x')"),
        ("binary_matrix", "[entry]"),
        ("n_queens", "[[*each] for each in valid_solutions]"),
        ("spiral_matrix", "oracle_answer.split()"),
        ("string_insertion", "oracle_answer"),
    ]:
        row = made(task=task, train_rows=5, heldout_rows=0).row("train", 0)
        for text in (run, cheat):
            with subtests.test(task=task, text=text):
                found = score(row, text, answer="last-line")
                assert (found.value, found.details["refused"]) == (0.0, "it is no plain formula or list")
    assert not (tmp_path / "ran").exists()
    row = made(task="spiral_matrix").row("train", 0)
    listed = f"[{row.reference['entry']['answer'].replace(' ', ', ')}]"
    assert score(row, listed, answer="last-line").value == 0.1


def test_what_is_refused(subtests):
    for options, message in [
        ({"task": "chainsum"}, "dataset.options.task: reasoning-gym has no task 'chainsum'; did you mean chain_sum"),
        (
            {"task": None, "tasks": [{"task": "lcm"}, {"task": "gdc"}]},
            r"dataset.options.tasks.1.task: reasoning-gym has no task 'gdc'; did you mean gcd",
        ),
        (
            {"config": {"max_term": 3}},
            "dataset.options.config.max_term: task 'chain_sum' has no such option; did you mean max_terms",
        ),
        ({"config": {"seed": 3}}, "dataset.options.config.seed: `run.seed`, `train_rows` and `heldout_rows`"),
        ({"config": {"max_terms": 0}}, "'chain_sum' cannot be made with {'max_terms': 0, 'seed': .*max_terms must"),
        ({"config": {"max_terms": "many"}}, "'chain_sum' cannot be made .*TypeError"),
        ({"task": "rearc"}, "dataset.options.task: the verifier of 'rearc' scores an entry otherwise"),
        ({"task": "ransom_note"}, "'ransom_note' draws other entries in each process"),
        ({"task": None}, "give either `task` or `tasks`"),
        ({"tasks": [{"task": "lcm"}]}, "give either `task` or `tasks`"),
        ({"task": None, "tasks": [{"task": "lcm"}], "config": SMALL}, "each of `tasks` has its own"),
        ({"system": "Be brief."}, "`system` needs `chat = true`"),
        ({"prompt": "Well?"}, "prompt: 'Well\\?' must show {question}, and nothing else in braces"),
    ]:
        with subtests.test(options=options), pytest.raises(ConfigError, match=message):
            made(**options)


def test_a_task_with_too_few_questions_is_told():
    """`2` and `3` are in the train split."""
    dataset = made(task="prime_factorization", config={"min_value": 2, "max_value": 3})
    with pytest.raises(DataError, match=r"none of 100 entries of task 'prime_factorization' for row 0 has a question"):
        dataset.row("heldout", 0)


def test_what_json_cannot_hold_is_told(subtests):
    for value, reason in [({1}, "type set is not JSON"), (float("nan"), "not JSON compliant"), (2**64, "than 64 bits")]:
        entry = {"question": "?", "answer": "1", "metadata": {"source_index": 7, "value": [value]}}
        with subtests.test(value=value), pytest.raises(DataError, match=f"'lcm'.*needs of entry 7: .*{reason}"):
            entry_as_json(entry, "lcm")


def test_bad_options_of_the_reward_are_refused(subtests):
    for bad, message in [
        ({"answer": "pattern"}, "needs `pattern`"),
        ({"pattern": "x"}, "needs `pattern`"),
        ({"answer": "pattern", "pattern": "("}, "is no regular expression"),
    ]:
        with subtests.test(bad=bad), pytest.raises(ValueError, match=message):
            ScoreOptions(**bad)
