from cosmos_core.config.problems import nearest, suggestion


def test_case_and_separators_do_not_count():
    assert nearest("Dr_GRPO", ["grpo", "dr-grpo"]) == ["dr-grpo"]


def test_the_best_comes_first_up_to_the_limit():
    assert nearest("gpro", ["dapo", "grpo", "group"], limit=2) == ["grpo", "group"]


def test_one_likeness_is_suggested_unless_more_are_asked_for():
    assert suggestion("gpro", ["dapo", "grpo", "group"]) == "did you mean grpo?"
    assert suggestion("gpro", ["dapo", "grpo", "group"], limit=2) == "did you mean grpo or group?"


def test_what_another_table_or_framework_has_is_told_with_its_home():
    known, nested = (
        ["policy", "reward", "run"],
        ["policy.optimizer.lr", "policy.replicas", "rollout.replicas", "run.steps"],
    )
    for name, home in [
        ("replica", "policy.replicas or rollout.replicas"),
        ("learning_rate", "policy.optimizer.lr"),
        ("optim", "policy.optimizer"),
        ("trian", "run"),
        ("actor", "policy"),
        ("reward_function", "reward"),
    ]:
        assert suggestion(name, known, nested) == f"did you mean {home}?"
    # Its own key is nearer than another table's, and a word of elsewhere needs something here that is the same.
    assert suggestion("step", ["stop", "step_s"], ["run.steps"]) == "did you mean run.steps?"
    assert suggestion("steps", ["steps"], ["run.steps"]) == "did you mean steps?"
    assert suggestion("train", ["x"]) == "allowed: x"


def test_without_a_likeness_all_is_listed():
    assert suggestion("zzz", ["b", "a"]) == "allowed: a, b"
    assert suggestion("zzz", []) == "nothing is allowed here"
