"""Proportions, the end of an epoch, and parts that cannot be mixed."""

import functools
import json
from collections import Counter
from pathlib import Path

import pytest

from cosmos_core.config.order import row_of
from cosmos_core.errors import ConfigError, DataError, PluginError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_dataset_mixture.proportions import rows_of_epoch


@functools.cache
def installed():
    """Looking for what is installed takes a while."""
    return PluginSet.load([("dataset", "mixture")])


def make(directory, parts, *, seed=0, **options):
    plugins = installed()
    context = dataset_context(plugins, seed, directory)
    return plugins.create("dataset", "mixture", {"parts": parts, **options}, context, "dataset.options")


def files(directory, **sizes):
    """A JSONL part for each name, with so many rows."""
    for name, size in sizes.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"q": f"{name} {n}"}) + "\n" for n in range(size)))
    return [{"plugin": "jsonl", "name": name, "options": {"train": f"{name}.jsonl", "prompt": "{q}"}} for name in sizes]


def weighted(parts, *weights):
    return [part | {"weight": weight} for part, weight in zip(parts, weights, strict=True)]


def texts(dataset, split="train"):
    return [dataset.row(split, index).text for index in range(dataset.size(split))]


def test_rows_of_an_epoch(subtests):
    for sizes, weights, epoch, counts in [
        ((100, 100), (1, 1), "longest", (100, 100)),
        ((100, 10), (1, 1), "longest", (100, 100)),
        ((100, 10), (1, 1), "shortest", (10, 10)),
        ((100, 10), (0.9, 0.1), "longest", (101, 11)),  # 100 / 0.9, rounded up, is 112: 100.8 and 11.2
        ((90, 10), (0.9, 0.1), "longest", (90, 10)),
        ((30, 10, 7), (0.5, 0.3, 0.2), "shortest", (16, 10, 7)),  # of 33: 16.5, 9.9 and 6.6
        ((5,), (7,), "longest", (5,)),
    ]:
        with subtests.test(sizes=sizes, weights=weights, epoch=epoch, counts=counts):
            found = rows_of_epoch(sizes, weights, epoch)
            assert found == counts
            pairs = list(zip(found, sizes, strict=True))
            assert all(count >= size if epoch == "longest" else count <= size for count, size in pairs)


def test_an_epoch_has_the_rows_of_its_weights_and_all_of_each_part(tmp_path):
    dataset = make(tmp_path, weighted(files(tmp_path, a=30, b=4), 0.75, 0.25))
    assert dataset.size("train") == 40
    seen = Counter(texts(dataset))
    assert Counter(text.split()[0] for text in seen.elements()) == {"a": 30, "b": 10}
    assert {text: count for text, count in seen.items() if text.startswith("a")} == {f"a {n}": 1 for n in range(30)}
    assert sorted(count for text, count in seen.items() if text.startswith("b")) == [2, 2, 3, 3]


def test_an_epoch_that_ends_with_the_shortest_part_counts_what_it_leaves_out(tmp_path):
    dataset = make(tmp_path, files(tmp_path, a=30, b=4), epoch="shortest")
    assert Counter(text.split()[0] for text in texts(dataset)) == {"a": 4, "b": 4}
    assert len(set(texts(dataset))) == 8
    (omission,) = dataset.omitted("train")
    assert (omission.reason, omission.num_rows) == ("a: beyond the end of the shortest part", 26)


def test_a_run_draws_each_part_as_often_as_its_weight_says_in_every_epoch(tmp_path):
    dataset = make(tmp_path, weighted(files(tmp_path, a=300, b=100, c=7), 6, 3, 1))
    size = dataset.size("train")
    for epoch in range(3):
        rows = [row_of(epoch * size + place, size, 5, 0)[1] for place in range(size)]
        drawn = Counter(dataset.row("train", row).metadata["part"] for row in rows)
        assert drawn == {"a": 300, "b": 150, "c": 50}


def test_the_seed_decides_which_rows_come_once_more(tmp_path):
    parts = files(tmp_path, a=30, b=20)
    assert texts(make(tmp_path, parts)) != texts(make(tmp_path, parts, seed=1))


def test_held_out_rows_are_those_of_all_parts_and_the_first_are_of_each(tmp_path):
    parts = files(tmp_path, a=30, b=60, c=10)
    for part, number in zip(parts, (10, 20, 0), strict=True):
        part["options"] |= {"heldout_rows": number} if number else {}
    dataset = make(tmp_path, weighted(parts, 100, 1, 1))
    held = texts(dataset, "heldout")
    assert len(set(held)) == 30
    assert Counter(text.split()[0] for text in held[:6]) == {"a": 2, "b": 4}


def test_rows_say_which_part_they_are_of_through_all_levels(tmp_path):
    inner = {"plugin": "mixture", "name": "inner", "options": {"parts": files(tmp_path, a=2)}}
    dataset = make(tmp_path, [inner, *files(tmp_path, b=2)])
    assert {dataset.row("train", index).metadata["part"] for index in range(4)} == {"inner/a", "b"}


def test_what_parts_leave_out_is_told(tmp_path):
    parts = files(tmp_path, a=3)
    (tmp_path / "a.jsonl").write_text('{"q": "x"}\n{"q": null}\n')
    parts[0]["options"]["on_bad_row"] = "skip"
    (omission,) = make(tmp_path, parts).omitted("train")
    assert (omission.reason, omission.num_rows) == ("a: field 'q' is null, not text", 1)


def test_parts_that_cannot_be_mixed(tmp_path):
    parts = files(tmp_path, a=1000, b=1)
    with pytest.raises(DataError, match="has no row of 'a' "):
        make(tmp_path, weighted(parts, 0.001, 1), epoch="shortest")
    (tmp_path / "n.jsonl").write_text('{"q": "x", "n": 1}\n')
    part = {"plugin": "jsonl", "options": {"train": "n.jsonl", "prompt": "{q}", "metadata": ["n"]}}
    paced = {"plugin": "curriculum", "options": {"difficulty": "n", "part": part}}
    with pytest.raises(ConfigError, match=r"dataset\.options\.parts\.1\.plugin: 'curriculum' paces its rows"):
        make(tmp_path, [parts[0], paced])


def test_options_that_are_wrong(subtests):
    for parts, message in [
        ([], "`parts` is empty"),
        ([{"plugin": "arithmetic"}] * 2, "two parts are called 'arithmetic'"),
        ([{"plugin": "arithmetic", "weight": 0}], "weight"),
        ([{"plugin": "arithmetic", "wieght": 1}], r"parts\.0\.wieght: unknown option; did you mean weight"),
        ([{"plugin": "arithmetic", "options": {"rows": 1}}], r"dataset\.options\.parts\.0\.options\.rows: unknown"),
    ]:
        with subtests.test(parts=parts, message=message), pytest.raises(ConfigError, match=message):
            make(Path(), parts)


def test_a_part_that_is_not_installed_is_named():
    with pytest.raises(PluginError, match="arithmetics"):
        make(Path(), [{"plugin": "arithmetics"}])
