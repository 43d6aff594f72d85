import pytest

from cosmos_core.data import DrawnDataset, is_held_out
from cosmos_core.types import Prompt


class Numbers(DrawnDataset):
    def draw(self, rng, split):
        return Prompt(text=f"{split} {rng.random()}")


def numbers(seed=0):
    return Numbers("numbers", seed, {"train": 5, "heldout": 2})


def test_a_row_is_a_function_of_seed_split_and_index():
    first, other = numbers(), numbers()
    rows = [first.row("train", index) for index in range(5)]
    assert [other.row("train", index) for index in reversed(range(5))] == rows[::-1]
    assert len({row.text for row in rows}) == 5
    assert numbers(seed=1).row("train", 0) != rows[0]
    assert first.row("heldout", 0).text.split()[1] != rows[0].text.split()[1]


def test_an_index_out_of_range_names_dataset_split_and_size(subtests):
    for split, index in [("train", 5), ("train", -1), ("heldout", 2)]:
        told = rf"numbers: row {index} of split '{split}', which has [25]"
        with subtests.test(split=split, index=index), pytest.raises(IndexError, match=told):
            numbers().row(split, index)


def test_the_held_out_share_is_kept():
    kept = sum(is_held_out(f"{number}", 0.2) for number in range(5000))
    assert abs(kept / 5000 - 0.2) < 0.02
    assert not any(is_held_out(f"{number}", 0.0) for number in range(100))
