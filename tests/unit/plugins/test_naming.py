from cosmos_core.plugins.discovery import is_valid, nearest_valid


def test_a_name_is_words_joined_by_hyphens_and_any_other_has_a_nearest():
    for name in ["a", "math", "dr-grpo", "qwen3", "x-1"]:
        assert is_valid(name)
        assert nearest_valid(name) == name
    for name, nearest in [
        ("My Mine", "my-mine"),
        ("a:b", "a-b"),
        ("slow_one", "slow-one"),
        ("2fast", "fast"),
        ("Größe", "groe"),
        ("", ""),
    ]:
        assert not is_valid(name)
        assert nearest_valid(name) == nearest
    assert not is_valid("math\n")
