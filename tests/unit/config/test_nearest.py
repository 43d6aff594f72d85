from cosmos_core.config.problems import nearest, suggestion


def test_case_and_separators_do_not_count():
    assert nearest("Dr_GRPO", ["grpo", "dr-grpo"]) == ["dr-grpo"]


def test_the_best_comes_first_up_to_the_limit():
    assert nearest("gpro", ["dapo", "grpo", "group"], limit=2) == ["grpo", "group"]


def test_one_likeness_is_suggested_unless_more_are_asked_for():
    assert suggestion("gpro", ["dapo", "grpo", "group"]) == "did you mean grpo?"
    assert suggestion("gpro", ["dapo", "grpo", "group"], limit=2) == "did you mean grpo or group?"


def test_without_a_likeness_all_is_listed():
    assert suggestion("zzz", ["b", "a"]) == "allowed: a, b"
    assert suggestion("zzz", []) == "nothing is allowed here"
