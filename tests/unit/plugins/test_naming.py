import pytest

from cosmos_core.plugins.discovery import is_valid, nearest_valid


@pytest.mark.parametrize("name", ["a", "math", "dr-grpo", "qwen3", "x-1"])
def test_a_name_is_words_joined_by_hyphens(name):
    assert is_valid(name)
    assert nearest_valid(name) == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("My Mine", "my-mine"), ("a:b", "a-b"), ("slow_one", "slow-one"), ("2fast", "fast"), ("Größe", "groe"), ("", "")],
)
def test_any_other_is_refused_with_the_nearest(name, nearest):
    assert not is_valid(name)
    assert nearest_valid(name) == nearest


def test_a_name_ends_where_it_ends():
    assert not is_valid("math\n")
