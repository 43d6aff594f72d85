"""Combinations that make no sense are refused with the reason; those beside them are not."""

import attrs
import pytest

from cosmos_algorithm_grpo import ClippedOptions, WeightedOptions, clipped, defaults, weighted
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import AlgorithmContext

STALE = AlgorithmContext(group_size=4, temperature=1.0, max_units=100, max_staleness=2)
ON_POLICY = attrs.evolve(STALE, max_staleness=0)
ALONE = attrs.evolve(STALE, group_size=1)
AVERAGED = attrs.evolve(ON_POLICY, generates_average=True)

REFUSED = [
    (STALE, {"importance_cap": 2.0}, r"importance_cap = 2\.0: it needs old_logprobs = 'recompute'"),
    (STALE, {"old_logprobs": "recompute"}, "samples up to 2 steps old would go uncorrected"),
    (
        AVERAGED,
        {"old_logprobs": "recompute"},
        r"samples of the average .* importance_cap .* old_logprobs = 'behaviour', or policy\.average\.publish = false",
    ),
    (
        ON_POLICY,
        {"old_logprobs": "recompute", "importance_floor": 0.5},
        r"importance_floor = 0\.5: it is the lower end .* is None",
    ),
    (
        ON_POLICY,
        {"old_logprobs": "recompute", "importance_floor": 0.5, "importance_cap": 0.5},
        r"importance_floor = 0\.5: it is the lower end",
    ),
    (STALE, {"baseline": "none"}, "scale = 'group-std': it is the deviation about the group's mean"),
    (ALONE, {}, "rollout.group_size = 1: a sample is compared with itself"),
    (
        ALONE,
        {"baseline": "leave-one-out", "scale": "batch"},
        "rollout.group_size = 1: a sample is compared with itself",
    ),
    (STALE, {"constant_length": 64}, "constant_length = 64: aggregation = 'token-mean' divides by no constant"),
    (STALE, {"kl_weight": 0.1, "kl_estimator": "k1"}, "the mean of its gradient is 0"),
    (
        STALE,
        {"kl_weight": 0.1, "kl_place": "reward", "scale": "none"},
        "kl_estimator = 'k3': taken off the reward, only k1",
    ),
    (
        STALE,
        {"kl_weight": 0.1, "kl_place": "reward", "kl_estimator": "k1"},
        "kl_place = 'reward': scale = 'group-std' divides by the deviation of the rewards alone",
    ),
]
ACCEPTED = [
    (ON_POLICY, {"old_logprobs": "recompute"}),
    (STALE, {"old_logprobs": "recompute", "importance_cap": 2.0}),
    (AVERAGED, {"old_logprobs": "recompute", "importance_cap": 2.0}),
    (AVERAGED, {}),
    (ALONE, {"baseline": "none", "scale": "batch"}),
    (STALE, {"baseline": "none", "scale": "none"}),
    (STALE, {"aggregation": "sequence-mean-token-sum", "constant_length": 64}),
    (STALE, {"kl_weight": 0.1, "kl_estimator": "k2"}),
    (STALE, {"kl_weight": 0.1, "kl_place": "reward", "kl_estimator": "k1", "scale": "batch"}),
    (STALE, {"kl_estimator": "k1"}),
]
MAKERS = [(clipped, ClippedOptions), (weighted, WeightedOptions)]


def test_what_makes_no_sense_is_refused_and_what_lies_beside_it_is_not():
    for make, options in MAKERS:
        for context, given, why in REFUSED:
            with pytest.raises(ConfigError, match=why) as caught:
                make(options(**given), context)
            assert str(caught.value).startswith("algorithm.options.")
        for context, given in ACCEPTED:
            make(options(**given), context)


def test_a_preset_with_a_misspelt_default_cannot_be_defined():
    with pytest.raises(TypeError, match="Preset has no field clip_hihg"):

        @attrs.frozen(kw_only=True, field_transformer=defaults(clip_hihg=0.3))
        class Preset(ClippedOptions):
            pass
