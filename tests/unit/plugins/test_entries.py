from cosmos_core.plugins.discovery import Entry, entries


def test_entries_of_the_groups_of_the_core():
    text = "[console_scripts]\ncosmos = a:b\n[cosmos_core.rewards]\n# a comment\nshort = acme.short:x\n"
    assert list(entries(text)) == [Entry("reward", "short", "acme.short:x", "cosmos_core.rewards")]


def test_a_group_that_is_nearly_one_is_found():
    for group, kind, is_doubtful in [
        ("cosmos_core.reward", "reward", False),
        ("cosmos_core.Rewards", "reward", False),
        ("cosmos-core.hooks", "hook", False),
        ("cosmos_core.algoritms", "algorithm", False),
        ("cosmos_core.datset", "dataset", False),
        ("cosmos.datasets", "dataset", True),
        ("cosmos.model", "model", True),
    ]:
        (entry,) = entries(f"[{group}]\nshort = acme\n")
        assert (entry.kind, entry.is_misspelt, entry.is_doubtful) == (kind, True, is_doubtful)


def test_a_group_of_others_or_of_a_later_release_is_left_alone():
    for group in [
        "cosmos_core.judges",
        "cosmos_core.codecs",
        "cosmos_core.nodes",
        "cosmos_core.tools",
        "cosmos_core.rewards.extra",
        "cosmos_rl.rewards",
        "cosmos_xenna.models",
        "cosmos.rewardz",
        "astronomer.cosmos",
        "cosmology.models",
        "pytest11",
    ]:
        assert not list(entries(f"[{group}]\nshort = acme\n"))
