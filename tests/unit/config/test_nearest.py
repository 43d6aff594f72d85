from cosmos_core.config.problems import nearest, suggestion


def test_case_and_separators_do_not_count():
    assert nearest("Dr_GRPO", ["grpo", "dr-grpo"]) == ["dr-grpo"]


def test_the_best_comes_first_up_to_the_limit():
    assert nearest("gpro", ["dapo", "grpo", "group"], limit=2) == ["grpo", "group"]


def test_without_a_likeness_all_is_listed():
    assert suggestion("zzz", ["b", "a"]) == "allowed: a, b"
    assert suggestion("zzz", []) == "nothing is allowed here"
