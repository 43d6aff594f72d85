"""Faults in options that the kit must name, whatever the kind."""

import pytest

from tests.nightly.kit.outcomes import unnamed, wrong

REWARD = """
import attrs
from cosmos_core.config import option
from cosmos_core.protocols import Provider, hookimpl

{options}

class Reward:
    def __init__(self, options, context):
        {init}

    def score(self, completion):
        return 1.0

@hookimpl
def cosmos_reward():
    return Provider(create={create}, options=Options)
"""
GOOD = "@attrs.frozen(kw_only=True)\nclass Options:\n    length: int = option(3, help='How long.')"


def reward(options=GOOD, init="self.options = options", create="Reward"):
    return REWARD.format(options=options, init=init, create=create)


PLANTED = {
    "mutable-default": (
        reward("@attrs.frozen(kw_only=True)\nclass Options:\n    words: list[str] = option([], help='Words.')"),
        "test_it_is_found_and_made_of_options_that_teach",
        "options whose default is one object for all instances: words; use factory=",
    ),
    "undocumented": (
        reward("@attrs.frozen(kw_only=True)\nclass Options:\n    length: int = 3"),
        "test_it_is_found_and_made_of_options_that_teach",
        "options without a help text: length",
    ),
    "not-frozen": (
        reward("@attrs.define(kw_only=True)\nclass Options:\n    length: int = option(3, help='How long.')"),
        "test_it_is_found_and_made_of_options_that_teach",
        "Options is not frozen",
    ),
    "rewritten": (
        reward(init="object.__setattr__(options, 'length', 4)"),
        "test_it_is_found_and_made_of_options_that_teach",
        "making an instance changed its options: length",
    ),
    "misspelt-hook": (
        reward() + "\n@hookimpl\ndef cosmos_run_start(): ...\n",
        "test_it_is_found_and_made_of_options_that_teach",
        "implements cosmos_run_start, which is no hook; did you mean cosmos_run_started?",
    ),
    "singleton": (
        reward(create="lambda options, context, made=Reward(None, None): made"),
        "test_it_is_found_and_made_of_options_that_teach",
        "the same object twice",
    ),
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    return run_kit("reward", {"good": reward(), **{name: source for name, (source, *_) in PLANTED.items()}})


def test_each_fault_is_named_and_none_where_there_is_none(outcomes):
    assert wrong(outcomes, ["good"]) == {}
    assert unnamed(outcomes, PLANTED) == {}
