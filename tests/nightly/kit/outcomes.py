"""Outcomes of a kit's run on planted faults, held against what it must say of each."""

SOUND = ("passed", "skipped")


def failures(outcomes):
    """Messages of the kit's failed tests of a plugin, by their names."""
    return {each.test: each.message for each in outcomes if each.result == "failed"}


def only(kit, tests):
    """A class body that leaves out every test of a kit but these."""
    return "".join(f"{name} = None\n" for name in dir(kit) if name.startswith("test_") and name not in tests)


def wrong(outcomes, good):
    """What the kit said against plugins that have no fault, or did not test of them."""
    untested = {
        name: [(each.test, each.result, each.message) for each in outcomes[name] if each.result not in SOUND]
        for name in good
    }
    return {name: untested[name] for name in good if untested[name] or not outcomes[name]}


def unnamed(outcomes, planted):
    """What the kit said of plugins whose fault, (source, test, *messages) of each, it did not name in that test."""
    # What a fixture finds is an error, or a failure, of each test that asks for it.
    said = {name: failures(outcomes[name]) for name in planted}
    return {
        name: said[name]
        for name, (_, test, *messages) in planted.items()
        if test not in said[name] or not all(message in said[name][test] for message in messages)
    }
