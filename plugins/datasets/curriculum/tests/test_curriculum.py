"""The order of rows, the pace, what a run draws of it, and rows without a difficulty."""

import functools
import json

import pytest

from cosmos_core.config.order import row_of
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols.dataset import Window
from cosmos_dataset_curriculum.pacing import competence, windows


@functools.cache
def installed():
    """Looking for what is installed takes a while."""
    return PluginSet.load([("dataset", "curriculum")])


def make(directory, levels, *, seed=0, metadata=("level",), **options):
    rows = [{"q": str(number), "level": level} for number, level in enumerate(levels)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    part = {"plugin": "jsonl", "options": {"train": "rows.jsonl", "prompt": "{q}", "metadata": list(metadata)}}
    plugins = installed()
    given = {"part": part, "difficulty": "level", **options}
    return plugins.create("dataset", "curriculum", given, dataset_context(plugins, seed, directory), "dataset.options")


def levels_of(dataset):
    return [dataset.row("train", index).metadata["level"] for index in range(dataset.size("train"))]


def test_rows_go_from_easy_to_hard_or_back(tmp_path):
    given = [3, 1.5, 2, -1]
    assert levels_of(make(tmp_path, given)) == [-1, 1.5, 2, 3]
    assert levels_of(make(tmp_path, given, hardest_first=True)) == [3, 2, 1.5, -1]


def test_equally_hard_rows_are_in_an_order_of_the_seed(tmp_path):
    def order(seed):
        dataset = make(tmp_path, [1] * 20, seed=seed)
        return [dataset.row("train", index).text for index in range(20)]

    assert order(0) == order(0) != order(1)
    assert order(0) != sorted(order(0), key=int)


def test_competence_by_hand():
    assert [competence(time, 0.2, "linear") for time in (0, 0.5, 1)] == pytest.approx([0.2, 0.6, 1.0])
    # sqrt(0.36 + 0.64 t): at 0, 0.36, 1.
    assert [competence(time, 0.6, "root") for time in (0, 0.4375, 1)] == pytest.approx([0.6, 0.8, 1.0])


def test_windows_by_hand():
    found = windows(100, 50, start=0.2, pacing="linear", num_windows=4)
    assert found == tuple(Window(num_prompts=25, num_rows=size) for size in (10, 20, 30, 40))


def test_a_short_stage_has_fewer_windows_and_the_same_prompts():
    found = windows(3, 50, start=0.1, pacing="root", num_windows=20)
    assert [window.num_prompts for window in found] == [1, 1, 1]


def test_the_schedule_ends_when_it_should_and_never_shrinks(tmp_path, subtests):
    for num_prompts in [1, 7, 64, 1000]:
        with subtests.test(num_prompts=num_prompts):
            dataset = make(tmp_path, range(100), over=0.5)
            found = dataset.windows(num_prompts)
            assert sum(window.num_prompts for window in found) == -(-num_prompts // 2)
            assert [window.num_rows for window in found] == sorted(window.num_rows for window in found)


def test_a_run_draws_easy_rows_first_and_all_rows_in_the_end(tmp_path):
    dataset = make(tmp_path, range(100), start=0.1, over=0.5, num_windows=5, pacing="linear")
    found = dataset.windows(1000)

    def drawn(first, last):
        rows = [row_of(position, 100, 0, 0, found)[1] for position in range(first, last)]
        return [dataset.row("train", row).metadata["level"] for row in rows]

    assert max(drawn(0, 100)) == 9
    assert sorted(drawn(0, 10)) == list(range(10))  # each once before any comes again
    assert max(drawn(100, 200)) == 27
    assert sorted(drawn(500, 600)) == list(range(100))
    assert drawn(500, 600) != sorted(drawn(500, 600))


def test_a_row_without_a_difficulty_is_refused(tmp_path, subtests):
    for value, seen in [(None, "None, no number"), ("hard", "'hard', no number"), (True, "True, no number")]:
        with (
            subtests.test(value=value, seen=seen),
            pytest.raises(DataError, match=f"jsonl: train row 1: its metadata 'level' is {seen}"),
        ):
            make(tmp_path, [1, value])


def test_a_difficulty_that_is_not_carried_is_told(tmp_path):
    with pytest.raises(DataError, match="train row 0: its metadata 'level' is not there; it has none"):
        make(tmp_path, [1], metadata=[])


def test_no_infinite_difficulty(tmp_path):
    with pytest.raises(DataError, match="field 'level' is inf, which JSON cannot hold"):
        make(tmp_path, [1, float("inf")])


def test_a_curriculum_of_a_curriculum_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"q": "x", "level": 1}\n')
    part = {"plugin": "jsonl", "options": {"train": "rows.jsonl", "prompt": "{q}", "metadata": ["level"]}}
    inner = {"plugin": "curriculum", "options": {"part": part, "difficulty": "level"}}
    with pytest.raises(ConfigError, match=r"dataset\.options\.part\.plugin: 'curriculum' has a pace of its own"):
        make(tmp_path, [1], part=inner)
