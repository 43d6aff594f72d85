import pytest

from cosmos_core.plugin.entries import Entry, entries


def test_entries_of_the_groups_of_the_core():
    text = "[console_scripts]\ncosmos = a:b\n[cosmos_core.rewards]\n# a comment\nshort = acme.short:x\n"
    assert list(entries(text)) == [Entry("reward", "short", "acme.short:x", "cosmos_core.rewards")]


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        ("cosmos_core.reward", "reward"),
        ("cosmos_core.Rewards", "reward"),
        ("cosmos-core.hooks", "hook"),
        ("cosmos.datasets", "dataset"),
        ("cosmos_core.algoritms", "algorithm"),
    ],
)
def test_a_group_that_is_nearly_one_is_found(group, kind):
    (entry,) = entries(f"[{group}]\nshort = acme\n")
    assert (entry.kind, entry.is_misspelt) == (kind, True)


@pytest.mark.parametrize("group", ["cosmos_core.judges", "astronomer.cosmos", "cosmology.models", "pytest11"])
def test_a_group_of_others_or_of_a_later_release_is_left_alone(group):
    assert not list(entries(f"[{group}]\nshort = acme\n"))
