"""Combinations of parts that make no sense, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_algorithm_grpo.options import PolicyOptions
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import AlgorithmContext
from cosmos_core.protocols.objectives import refuse_recomputed


def check_combination(options: PolicyOptions, context: AlgorithmContext) -> None:
    """Refuse what makes no sense together.

    Raises:
        ConfigError: The option, its value, why it does not fit, and what would.
    """
    for problem in (*_advantages(options, context), *_corrections(options, context), *_divergence(options)):
        raise ConfigError(f"algorithm.options.{problem}")


def _advantages(options: PolicyOptions, context: AlgorithmContext) -> Iterator[str]:
    if options.baseline == "none" and options.scale == "group-std":
        yield (
            "scale = 'group-std': it is the deviation about the group's mean, which baseline = 'none' leaves in the "
            "advantages; set baseline = 'group-mean', or scale = 'batch'"
        )
    if options.baseline != "none" and context.group_size < 2:
        yield (
            f"baseline = '{options.baseline}', rollout.group_size = {context.group_size}: a sample is compared with "
            "itself, so every advantage would be 0; raise rollout.group_size, or set baseline = 'none' and scale = "
            "'batch'"
        )
    if options.turn_discount != 1.0 and options.credit == "sample":
        yield (
            f"turn_discount = {options.turn_discount}: credit = 'sample' counts the whole reward for every turn; set "
            "credit = 'turn', or leave turn_discount out"
        )
    if options.credit == "turn" and options.kl_weight > 0.0 and options.kl_place == "reward":
        yield (
            "credit = 'turn': with kl_place = 'reward' decisions are rewarded between turns; set kl_place = 'loss', or "
            "credit = 'sample'"
        )
    if options.constant_length is not None and options.aggregation != "sequence-mean-token-sum":
        yield (
            f"constant_length = {options.constant_length}: aggregation = '{options.aggregation}' divides by no "
            "constant; leave it out, or set aggregation = 'sequence-mean-token-sum'"
        )


def _corrections(options: PolicyOptions, context: AlgorithmContext) -> Iterator[str]:
    if options.old_logprobs == "behaviour" and options.importance_cap is not None:
        yield (
            f"importance_cap = {options.importance_cap}: it needs old_logprobs = 'recompute'; with "
            "'behaviour' the ratio itself corrects for stale samples, so leave importance_cap out"
        )
    if options.importance_floor is not None and options.importance_floor >= (options.importance_cap or 0.0):
        yield (
            f"importance_floor = {options.importance_floor}: it is the lower end of a range whose "
            f"upper end is importance_cap, which is {options.importance_cap}; set a larger importance_cap, such as 5.0"
        )
    if options.old_logprobs == "recompute" and options.importance_cap is None:
        uncorrected = refuse_recomputed(context, instead="importance_cap (2.0 is usual)")
        if uncorrected is not None:
            yield uncorrected


def _divergence(options: PolicyOptions) -> Iterator[str]:
    if options.kl_weight == 0.0:
        return
    if options.kl_place == "loss" and options.kl_estimator == "k1":
        yield (
            "kl_estimator = 'k1': the mean of its gradient is 0, so as a term of the loss it holds the policy near "
            "nothing; set kl_estimator = 'k3' or 'k2', or kl_place = 'reward'"
        )
    if options.kl_place == "reward" and options.kl_estimator != "k1":
        yield (
            f"kl_estimator = '{options.kl_estimator}': taken off the reward, only k1 has the gradient of the "
            "divergence; set kl_estimator = 'k1', or kl_place = 'loss'"
        )
    if options.kl_place == "reward" and options.scale == "group-std":
        yield (
            "kl_place = 'reward': scale = 'group-std' divides by the deviation of the rewards alone, so the weight of "
            "the divergence would differ from prompt to prompt; set scale = 'none' or 'batch', or kl_place = 'loss'"
        )
