"""Faults of algorithms in what they declare: capabilities, properties, and options that change in a run."""

from tests.nightly.kit.faulty_algorithm import LOSS, NEAR, AlgorithmFaults, algorithm

OPTIONS = """
import attrs
from attrs import validators as check
from cosmos_core.config import option
from cosmos_core.errors import ConfigError

@attrs.frozen(kw_only=True)
class Options:
    scale: float = option(1.0, help="h", validator={validator}, dynamic=True)

class Scaled(Algorithm):
    kept = 1.0

    def __init__(self, options, context):
        super().__init__(options, context)
        {keep}

    def loss(self, d):
        return Loss(loss_N=-d.advantages_N * (d.logprobs_N - d.old_logprobs_N).clamp(-20, 20).exp() * {scale})
"""


def steered(*, validator="check.gt(0.0)", keep="self.scale = options.scale", scale="self.scale"):
    """An algorithm with an option that declares itself dynamic."""
    source = algorithm() + OPTIONS.format(validator=validator, keep=keep, scale=scale)
    return source.replace("Provider(create=Algorithm,", "Provider(create=Scaled, options=Options,")


INHERITING = """
from cosmos_core.protocols import AlgorithmCapabilities, Loss, PlainAlgorithm, Provider, hookimpl
from cosmos_core.protocols.objectives import relative_rewards

class Algorithm(PlainAlgorithm):
    def __init__(self, options, context): ...

    def advantages(self, groups):
        return relative_rewards(groups, eps=1e-6)

    def loss(self, d):
        return Loss(loss_N=-d.advantages_N * d.logprobs_N)

@hookimpl
def cosmos_algorithm():
    return Provider(create=Algorithm, capabilities=AlgorithmCapabilities(min_group_size=2))
"""
SOUND = {
    "inheriting": (INHERITING, ""),
    "steered": (steered(), "on_policy_scale = 1.0"),
}
PLANTED = {
    "no-group": (
        algorithm(capabilities="min_group_size=0"),
        "test_declarations_mean_something",
        "min_group_size is 0; it must be an integer of at least 1",
    ),
    "unknown-semantics": (
        algorithm(capabilities="min_group_size=2, logprob_semantics=frozenset({'exact'})"),
        "test_declarations_mean_something",
        "can only use exact ones",
    ),
    "no-decisions": (
        algorithm(capabilities="min_group_size=2, decisions=frozenset()"),
        "test_declarations_mean_something",
        "no recipe can use the algorithm as it is declared",
    ),
    "demonstrations-with-behaviour": (
        algorithm(loss="return Loss(loss_N=-d.logprobs_N)", capabilities="source='demonstrations'"),
        "test_declarations_mean_something",
        "old_logprobs is 'behaviour', but nobody generated a demonstration",
    ),
    "properties-change": (
        algorithm(loss="self.constant_length += 1\n" + LOSS),
        "test_the_same_is_answered_each_time",
        "constant_length of the same decisions and groups differ when asked for again",
    ),
    "wrong-aggregation": (
        algorithm(declared='aggregation = "mean"'),
        "test_declarations_mean_something",
        "aggregation is 'mean'; it must be one of",
    ),
    "an-unknown-model": (
        algorithm(loss=NEAR, declared='consults = {"judge": None}'),
        "test_declarations_mean_something",
        "give a mapping with keys among 'reference', 'teacher'",
    ),
    "dynamic-for-nothing": (
        steered(scale="1.0"),
        "test_dynamic_options_become_what_they_allow_and_count",
        "the option scale is dynamic, but prices, advantages, admissions and properties are the same with 1.0 and with",
    ),
    "dynamic-read-once": (
        steered(
            keep="Scaled.kept = Scaled.__dict__.get('first', options.scale); Scaled.first = Scaled.kept",
            scale="self.kept",
        ),
        "test_dynamic_options_become_what_they_allow_and_count",
        "read it from the options that Provider.create is given",
    ),
    "dynamic-for-all-instances": (
        steered(keep="Scaled.kept = options.scale", scale="self.kept"),
        "test_dynamic_options_become_what_they_allow_and_count",
        "once an instance was made with another scale, the one before goes by it, too",
    ),
    "dynamic-within-hidden-bounds": (
        steered(
            keep="""self.scale = options.scale
        if options.scale > 9:
            raise ConfigError("scale: too large")"""
        ),
        "test_dynamic_options_become_what_they_allow_and_count",
        "may become a number > 0, but 100.0 is refused: algorithm.options.scale: too large",
    ),
    "dynamic-beyond-telling": (
        steered(validator="lambda *_: None"),
        "test_dynamic_options_become_what_they_allow_and_count",
        "scale: what <function Options.<lambda> at",
    ),
}


class TestDeclarations(AlgorithmFaults):
    sound = SOUND
    planted = PLANTED
