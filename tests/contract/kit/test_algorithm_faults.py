"""Faults in algorithms that the kit must name, and sound ones of several sorts that it must pass."""

import textwrap

import pytest

ALGORITHM = """
import random
import torch
from cosmos_core.protocols import Aggregation, AlgorithmCapabilities, Loss, Provider, hookimpl

class Algorithm:
    aggregation = Aggregation.TOKEN_MEAN
    constant_length = 1
    old_logprobs = "behaviour"
    needs_entropy = False
    skips_zero_advantage = True
    {declared}

    def __init__(self, options, context):
        self.seen = 0

    def admit(self, group):
        {admit}

    def advantages(self, groups):
        return [self.of_group(group.samples) for group in groups]

    def of_group(self, samples):
        rewards = [sample.reward if sample.is_scored else None for sample in samples]
        {advantages}
        known = [reward for reward in rewards if reward is not None]
        return [None if each is None else each - (sum(known) - each) / (len(known) - 1) for each in rewards]

    def loss(self, d):
        {loss}

@hookimpl
def cosmos_algorithm():
    return Provider(create=Algorithm, capabilities=AlgorithmCapabilities({capabilities}))
"""
LOSS = """
ratio_N = (d.logprobs_N - d.old_logprobs_N).clamp(-20, 20).exp()
return Loss(loss_N=-d.advantages_N * ratio_N, metrics={"ratio": ratio_N.detach()})
"""
REINFORCE = "return Loss(loss_N=-d.advantages_N * d.logprobs_N)"
SEQUENCE_RATIO = """
log_ratio_N = d.logprobs_N - d.old_logprobs_N
sums_S = torch.zeros(d.num_sequences).index_add(0, d.sequence_N, log_ratio_N)
ratio_S = (sums_S / torch.bincount(d.sequence_N)).clamp(-20, 20).exp()
return Loss(loss_N=-d.advantages_N * ratio_S[d.sequence_N])
"""
OF_TOKENS = "min_group_size=2, payload_kinds=frozenset({'tokens'})"
WEIGHTED_BY_ENTROPY = "return Loss(loss_N=-d.advantages_N * d.logprobs_N * (1 + d.entropy_N.clamp(max=5)))"
STRENGTH = "return Loss(loss_N=-d.advantages_N * d.advantages_N.abs() * d.logprobs_N)"
UNSCORED_AS_ZERO = """
mean = sum(reward or 0.0 for reward in rewards) / len(rewards)
return [None if reward is None else reward - mean for reward in rewards]
"""
FREE = {"declared": 'old_logprobs = "none"'}
WEIGHTED = """
weight_N = (d.logprobs_N.detach() - d.old_logprobs_N).clamp(-20, 20).exp().clamp(max=1.05)
return Loss(loss_N=-weight_N * d.advantages_N * d.logprobs_N)
"""
WEIGHTED_FORMULA = """
def reference(self, d):
    weight_N = (d.logprobs_N.detach() - d.old_logprobs_N).exp().clamp(max=1.05)
    return -weight_N * d.advantages_N * d.logprobs_N
"""
CONSULTING = 'consults = {"reference": None}; skips_zero_advantage = False'
NEAR = """
ratio_N = (d.logprobs_N - d.old_logprobs_N).clamp(-20, 20).exp()
distance_N = (d.frozen["reference"].logprobs_N - d.logprobs_N).clamp(-20, 20)
return Loss(loss_N=-d.advantages_N * ratio_N + 0.1 * (distance_N.exp() - 1 - distance_N))
"""


def algorithm(*, loss=LOSS, admit="return None", advantages="", declared="", capabilities="min_group_size=2"):
    inside = {"loss": loss, "admit": admit, "advantages": advantages}
    blocks = {name: textwrap.indent(code.strip(), " " * 8).lstrip() for name, code in inside.items()}
    return ALGORITHM.format(declared=declared.replace("; ", "\n    "), capabilities=capabilities, **blocks)


ESTIMATING = """
from cosmos_core.protocols import Estimate

class Whitened(Algorithm):
    def shaped(self, taken):
        kl_n = (taken.logprobs_n - taken.frozen_n["reference"]).clamp(-20, 20)
        {shape}
        return taken.advantage - 0.1 * kl_n.flip(0).cumsum(0).flip(0)

    def summarise(self, taken):
        values_n = self.shaped(taken)
        {summarise}
        return [len(values_n), float(values_n.sum())]

    def estimate(self, taken, batch):
        {estimate}
        mean = sum(batch[place][1] for place in sorted(batch)) / sum(batch[place][0] for place in batch)
        return Estimate(advantages_n=self.shaped(taken) - mean)
"""


def estimating(*, shape="", summarise="", estimate="", declared=CONSULTING, loss=LOSS):
    """An algorithm that takes a divergence off the reward and centres advantages over the batch."""
    blocks = {"shape": shape, "summarise": summarise, "estimate": estimate}
    blocks = {name: textwrap.indent(code.strip(), " " * 8).lstrip() for name, code in blocks.items()}
    source = algorithm(declared=declared, loss=loss) + ESTIMATING.format(**blocks)
    return source.replace("Provider(create=Algorithm,", "Provider(create=Whitened,")


VALUING = CONSULTING + "; needs_critic = True"
VALUES_ALONE = 'old_logprobs = "none"; needs_critic = True'


def targets(values):
    """What estimates these targets for the critic."""
    return f"return Estimate(advantages_n=self.shaped(taken), targets_n={values})"


def altered(old, new):
    """The sound loss with something else in a place of it."""
    assert old in LOSS
    return LOSS.replace(old, new)


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


SOUND = {
    "steered": (steered(), "on_policy_scale = 1.0"),
    "clipped": (algorithm(), ""),
    "reinforce": (algorithm(loss=REINFORCE, **FREE), "def reference(self, d): return -d.advantages_N * d.logprobs_N"),
    "recomputed": (algorithm(declared='old_logprobs = "recompute"'), ""),
    "five-of-a-prompt": (algorithm(capabilities="min_group_size=5"), ""),
    "latents": (algorithm(capabilities="min_group_size=2, payload_kinds=frozenset({'latents'})"), ""),
    "sequence-ratio": (algorithm(loss=SEQUENCE_RATIO, capabilities=OF_TOKENS), "couples_decisions = True"),
    "half": (algorithm(loss=altered("-d", "-0.5 * d")), "on_policy_scale = 0.5"),
    "strength": (algorithm(loss=STRENGTH, **FREE), "on_policy_scale = None"),
    "entropy": (
        algorithm(loss=WEIGHTED_BY_ENTROPY, declared='old_logprobs = "none"; needs_entropy = True'),
        "on_policy_scale = None",
    ),
    "entropy-reported": (
        algorithm(loss=REINFORCE, declared='old_logprobs = "none"; needs_entropy = True'),
        "ignores = frozenset({'entropy'})",
    ),
    "bonus": (
        algorithm(loss=altered("ratio_N,", "ratio_N + 0.01 * ratio_N,"), declared="skips_zero_advantage = False"),
        "has_other_terms = True",
    ),
    "weighted": (algorithm(loss=WEIGHTED), WEIGHTED_FORMULA),
    "near-a-reference": (algorithm(loss=NEAR, declared=CONSULTING), "has_other_terms = True"),
    "divergence-of-distributions": (
        algorithm(
            loss=altered("* ratio_N,", '* ratio_N + 0.1 * d.frozen["teacher"].divergence_N,'),
            declared='consults = {"teacher": Divergence(kind="jsd")}; skips_zero_advantage = False',
        ).replace("Loss,", "Divergence, Loss,", 1),
        "has_other_terms = True",
    ),
    "estimating": (estimating(), ""),
    "preferences": (
        algorithm(
            loss="return Loss(loss_N=-d.advantages_N * d.logprobs_N)",
            declared='old_logprobs = "none"; skips_zero_advantage = False',
            capabilities="source='preferences'",
        ),
        "",
    ),
    "contrast-only": (
        algorithm(
            admit="return 'equal' if len({s.reward for s in group.samples if s.is_scored}) == 1 else None",
            advantages="known = [r for r in rewards if r is not None]; assert min(known) < max(known)",
        ),
        "",
    ),
    "solvable-only": (
        algorithm(
            admit="return None if any(s.reward == 1.0 for s in group.samples if s.is_scored) else 'none right'",
            advantages="return [None if r is None else r / [r for r in rewards if r].count(1.0) for r in rewards]",
        ),
        "",
    ),
    "demonstrations": (
        algorithm(
            loss="return Loss(loss_N=-d.logprobs_N)",
            declared='old_logprobs = "none"; skips_zero_advantage = False',
            capabilities="source='demonstrations'",
        ),
        "",
    ),
}

PLANTED = {
    "wrong-sign": (
        algorithm(loss=altered("-d", "d")),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "a decision with advantage 1 has a policy gradient of 1, where -1 is expected; the sign is wrong",
    ),
    "detached": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N.detach(), metrics")),
        "test_every_decision_gets_a_price",
        "loss_N carries no gradient, so nothing would be learnt",
    ),
    "detached-in-part": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N.detach() + 0 * d.logprobs_N, metrics")),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "nothing would be learnt: decisions.logprobs_N was detached",
    ),
    "wrong-scale": (
        algorithm(loss=altered("-d", "-2 * d")),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "is 2 times minus its advantage, expected 1 times",
    ),
    "wrong-scale-by-length": (
        algorithm(loss=altered("-d", "-1 / torch.bincount(d.sequence_N)[d.sequence_N] * d")),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "is 0.142857 times minus the advantage for one decision and 1 times for another, expected 1 times for each",
    ),
    "biased-advantage": (
        algorithm(loss=altered("-d.advantages_N", "-(d.advantages_N + 0.1)"), declared="skips_zero_advantage = False"),
        "test_zero_advantage_gives_zero_policy_gradient",
        "a decision with advantage 0 has a gradient of -0.1 at advantage 0",
    ),
    "advantages-flipped": (
        algorithm(advantages="return [None if r is None else -r for r in rewards]"),
        "test_a_higher_reward_never_lowers_the_advantage_of_its_sample",
        "has an advantage of -0, and of -0.75 once its own reward is 0.75; is the sign wrong?",
    ),
    "advantages-constant": (
        algorithm(advantages="return [None if r is None else 1.0 for r in rewards]"),
        "test_a_higher_reward_never_lowers_the_advantage_of_its_sample",
        "no sample's advantage rises with its own reward, in any group",
    ),
    "advantages-of-neighbours": (
        algorithm(advantages="return [None if r is None else rewards[i - 1] or 0.5 for i, r in enumerate(rewards)]"),
        "test_a_higher_reward_never_lowers_the_advantage_of_its_sample",
        "no sample's advantage rises with its own reward, in any group",
    ),
    "advantages-zero": (
        algorithm(advantages="return [None if r is None else 0.0 for r in rewards]"),
        "test_something_is_left_to_train_on",
        "every advantage is 0, though rewards differ (rewards 0, 0.25, 0.5, 0.75; ",
    ),
    "admits-nothing": (
        algorithm(admit="return 'no'"),
        "test_something_is_left_to_train_on",
        "admit refuses every group, for example one with rewards 0, 0.25, 0.5, 0.75: 'no'",
    ),
    "admits-by-a-failed-reward": (
        algorithm(admit="return 'lucky' if any(s.reward == 5.0 for s in group.samples) else None"),
        "test_a_failed_sample_is_unscored_even_with_a_number",
        "admit refuses a group for the reward of a sample whose status is reward_failed",
    ),
    "demonstrations-unlikelier": (
        algorithm(
            loss="return Loss(loss_N=d.logprobs_N)",
            declared='old_logprobs = "none"; skips_zero_advantage = False',
            capabilities="source='demonstrations'",
        ),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "the sign is wrong",
    ),
    "not-the-formula": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N.clamp(0.99, 1.01), metrics")),
        "test_the_loss_equals_its_reference[0.05]",
        "and its reference",
    ),
    "mean-inside": (
        algorithm(loss=altered("-d.advantages_N * ratio_N", "-d.advantages_N * ratio_N / len(ratio_N)")),
        "test_a_step_does_not_depend_on_its_micro_batches[two micro-batches]",
        "with two micro-batches; price each decision from its own sequence alone",
    ),
    "whitened-in-the-micro-batch": (
        algorithm(loss=altered("-d.advantages_N", "-(d.advantages_N / (d.advantages_N.abs().mean() + 1e-6))")),
        "test_a_step_does_not_depend_on_its_ranks[two ranks]",
        "with two ranks; price each decision from its own sequence alone",
    ),
    "on-the-first-micro-batch": (
        algorithm(
            loss="""
is_whole = isinstance(self.seen, torch.Tensor) and len(self.seen) >= len(d.advantages_N)
first = self.seen = self.seen if is_whole else d.advantages_N
return Loss(loss_N=-first[:len(d.logprobs_N)] * (d.logprobs_N - d.old_logprobs_N).clamp(-20, 20).exp())
"""
        ),
        "test_a_step_does_not_depend_on_its_micro_batches[two micro-batches]",
        "with two micro-batches; price each decision from its own sequence alone",
    ),
    "gradient-through-a-clamped-weight": (
        algorithm(loss=WEIGHTED.replace(".detach()", "").replace(" * d.logprobs_N)", ")")),
        "test_the_loss_equals_its_reference[0.05]",
        "the price of a decision is",
    ),
    "by-place": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N * (1 + d.sequence_N), metrics")),
        "test_a_step_does_not_depend_on_the_order_of_sequences[the sequences reversed]",
        "with the sequences reversed; price each decision",
    ),
    "scalar": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N).sum(), metrics").replace("loss_N=-", "loss_N=(-")),
        "test_every_decision_gets_a_price",
        "loss gave a float32 tensor of shape [] for 22 decisions",
    ),
    "coupled-sequences": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N * ratio_N.mean() / ratio_N.mean().detach(), metrics")),
        "test_the_price_of_a_decision_depends_on_its_own_log_prob_only",
        "sequences are priced one by one",
    ),
    "coupled": (
        algorithm(loss=SEQUENCE_RATIO),
        "test_the_price_of_a_decision_depends_on_its_own_log_prob_only",
        "the price of decision 0 (sequence 0) has a gradient with respect to the log-prob of decision",
    ),
    "unbounded-ratio": (
        algorithm(loss=altered(".clamp(-20, 20)", "")),
        "test_gradients_are_finite_however_far_off_policy",
        "bound log ratios (clamp(-20, 20)) before their exponential",
    ),
    "zero-advantage-not-skipped": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N + 0.1 * (d.logprobs_N - d.old_logprobs_N) ** 2, metrics")),
        "test_zero_advantage_gives_zero_policy_gradient",
        "skips_zero_advantage is declared, but a decision with advantage 0 has a gradient of",
    ),
    "advantage-against-nothing": (
        algorithm(
            loss=altered("-d.advantages_N * ratio_N", "-(d.advantages_N + (d.advantages_N == 0)) * ratio_N"),
            declared="skips_zero_advantage = False",
        ),
        "test_zero_advantage_gives_zero_policy_gradient",
        "a policy term must vanish with its advantage",
    ),
    "ratio-against-itself": (
        algorithm(loss=altered("d.old_logprobs_N", "d.logprobs_N.detach()")),
        "test_the_old_log_probs_that_it_asks_for_are_used",
        "old_logprobs = 'behaviour', but prices and gradients are the same whatever",
    ),
    "old-without-asking": (
        algorithm(**FREE),
        "test_every_decision_gets_a_price",
        "old_logprobs_N is None, as old_logprobs is 'none'), raised TypeError",
    ),
    "entropy-without-asking": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N * (1 + d.entropy_N), metrics")),
        "test_every_decision_gets_a_price",
        "entropy_N is None, as needs_entropy is False), raised TypeError",
    ),
    "entropy-for-nothing": (
        algorithm(declared="needs_entropy = True"),
        "test_the_entropy_that_it_asks_for_is_used",
        "needs_entropy is True, but prices and gradients are the same whatever",
    ),
    "entropy-bonus-without-gradient": (
        algorithm(
            loss=altered("* ratio_N,", "* ratio_N - 0.01 * d.entropy_N.detach(),"), declared="needs_entropy = True"
        ),
        "test_the_entropy_that_it_asks_for_is_used",
        "decisions.entropy_N changes prices and no gradient: it is detached, so a bonus of it moves nothing",
    ),
    "reference-for-nothing": (
        algorithm(declared='consults = {"reference": None}'),
        "test_the_frozen_models_that_it_consults_are_used",
        "consults names the reference, but gradients are the same whatever it says",
    ),
    "reference-without-asking": (
        algorithm(loss=NEAR, declared="skips_zero_advantage = False"),
        "test_every_decision_gets_a_price",
        "raised KeyError: 'reference'",
    ),
    "reference-as-a-constant": (
        algorithm(loss=NEAR.replace("- d.logprobs_N).clamp", "- d.logprobs_N.detach()).clamp"), declared=CONSULTING),
        "test_the_frozen_models_that_it_consults_are_used",
        "gradients are the same whatever it says",
    ),
    "an-unknown-model": (
        algorithm(loss=NEAR, declared='consults = {"judge": None}'),
        "test_properties_have_values_that_the_trainer_knows",
        "give a mapping with keys among 'reference', 'teacher'",
    ),
    "estimates-what-it-has-seen": (
        estimating(
            summarise="self.seen += float(values_n.sum())",
            estimate="return Estimate(advantages_n=self.shaped(taken) - self.seen)",
        ),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "estimates made by an instance that summarised nothing differ",
    ),
    "estimates-by-order": (
        estimating(estimate="return Estimate(advantages_n=self.shaped(taken) - next(iter(batch.values()))[1])"),
        "test_an_estimate_does_not_depend_on_the_order_of_others",
        "an estimate changes with the order of the other sequences",
    ),
    "estimates-in-place": (
        estimating(shape="taken.logprobs_n.mul_(0.5)"),
        "test_what_was_taken_is_left_as_it_is",
        "summarise or estimate changed log-probs or values in place",
    ),
    "estimates-change-values": (
        estimating(shape="taken.values_n.mul_(0.5)", declared=VALUING),
        "test_what_was_taken_is_left_as_it_is",
        "summarise or estimate changed log-probs or values in place",
    ),
    "targets-what-it-has-seen": (
        estimating(summarise="self.seen += 1", estimate=targets("taken.values_n - self.seen"), declared=VALUING),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "estimates made by an instance that summarised nothing differ",
    ),
    "targets-by-order": (
        estimating(estimate=targets("taken.values_n - next(iter(batch.values()))[1]"), declared=VALUING),
        "test_an_estimate_does_not_depend_on_the_order_of_others",
        "an estimate changes with the order of the other sequences",
    ),
    "targets-of-some": (
        estimating(estimate=targets("taken.values_n if taken.place else None"), declared=VALUING),
        "test_every_decision_gets_a_price",
        "estimate gave targets_n for some sequences and None for others",
    ),
    "estimates-longer-than-values": (
        estimating(
            estimate="return Estimate(advantages_n=torch.zeros(len(taken.values_n) + 1))",
            declared=VALUES_ALONE,
            loss=REINFORCE,
        ).replace("self.shaped(taken)", "taken.values_n"),
        "test_every_decision_gets_a_price",
        "estimate gave a float32 tensor of shape [6] as advantages_n of 5 decisions",
    ),
    "estimates-one-number": (
        estimating(estimate="return Estimate(advantages_n=self.shaped(taken).mean())"),
        "test_every_decision_gets_a_price",
        "estimate gave a float32 tensor of shape [] as advantages_n of 5 decisions",
    ),
    "estimates-infinity": (
        estimating(estimate="return Estimate(advantages_n=self.shaped(taken) / 0.0)"),
        "test_every_decision_gets_a_price",
        "in advantages_n; bound what it is computed from",
    ),
    "learns-its-scale": (
        algorithm(loss="self.seen = self.seen or d.logprobs_N.min().item()\n" + altered("-d", "self.seen * d")),
        "test_the_same_decisions_cost_the_same_each_time",
        "priced after others cost something else",
    ),
    "remembers": (
        algorithm(loss="self.seen += 1\n" + altered("-d.advantages_N", "-(1 + self.seen) / 2 * d.advantages_N")),
        "test_the_same_decisions_cost_the_same_each_time",
        "priced again cost something else",
    ),
    "writes-its-inputs": (
        algorithm(loss=altered("-d.advantages_N", "-d.advantages_N.clamp_(-1, 1)")),
        "test_the_loss_leaves_its_inputs_as_they_are",
        "loss changed decisions.advantages_N in place",
    ),
    "metric-with-gradient": (
        algorithm(loss=altered("ratio_N.detach()", "ratio_N")),
        "test_metrics_are_one_detached_number_for_each_decision",
        "the metric 'ratio' carries a gradient",
    ),
    "metric-averaged": (
        algorithm(loss=altered("ratio_N.detach()", "ratio_N.detach().mean()")),
        "test_metrics_are_one_detached_number_for_each_decision",
        "the metric 'ratio' is a float32 tensor of shape [] for 22 decisions",
    ),
    "metric-infinite": (
        algorithm(loss=altered("ratio_N.detach()", "(d.old_logprobs_N - d.logprobs_N.detach()).exp()")),
        "test_metrics_are_one_detached_number_for_each_decision",
        "the metric 'ratio' of a decision is inf at advantage 1, log-prob -100, old log-prob 0",
    ),
    "metric-of-the-core": (
        algorithm(loss=altered('"ratio"', '"loss"')),
        "test_metrics_are_one_detached_number_for_each_decision",
        "the metric 'loss' has a name of the core's own",
    ),
    "unscored-as-zero": (
        algorithm(advantages=UNSCORED_AS_ZERO),
        "test_unscored_samples_take_no_part_in_their_group",
        "leave samples whose is_scored is False out of every mean",
    ),
    "unscored-as-zero-by-constant": (
        algorithm(advantages="return [None if r is None else r - sum(x or 0 for x in rewards) / 4 for r in rewards]"),
        "test_an_unscored_sample_is_no_zero",
        "changes the advantages of its group as a reward of 0 does",
    ),
    "unscored-trained-on": (
        algorithm(advantages="return [(reward or 0.0) - 0.5 for reward in rewards]"),
        "test_scored_samples_have_a_finite_advantage_and_others_none",
        "advantages gave -0.5 to an unscored sample in a group with rewards 0, None, 0.5, 0.75; give None",
    ),
    "reward-of-a-failed-sample": (
        algorithm(advantages="rewards = [sample.reward for sample in samples]"),
        "test_a_failed_sample_is_unscored_even_with_a_number",
        "look at sample.is_scored",
    ),
    "not-a-number": (
        algorithm(
            advantages="return [None if r is None else r - max(rewards, key=bool) * float('inf') for r in rewards]"
        ),
        "test_scored_samples_have_a_finite_advantage_and_others_none",
        "to a scored sample in a group with rewards",
    ),
    "divides-by-nothing": (
        algorithm(capabilities="min_group_size=1"),
        "test_scored_samples_have_a_finite_advantage_and_others_none",
        "raised ZeroDivisionError",
    ),
    "random-advantages": (
        algorithm(advantages="return [None if reward is None else random.random() for reward in rewards]"),
        "test_every_replica_computes_the_same_advantages",
        "differ at a second call",
    ),
    "advantages-of-its-own": (
        algorithm(advantages="self.seen = self.seen or random.random()\nreturn [r and r * self.seen for r in rewards]"),
        "test_every_replica_computes_the_same_advantages",
        "two instances give different advantages to the same groups",
    ),
    "writes-groups": (
        algorithm(advantages="samples[0].rewards.clear()"),
        "test_groups_are_read_never_written",
        "advantages or admit changed the groups",
    ),
    "admits-with-a-boolean": (
        algorithm(admit="return False"),
        "test_a_group_is_admitted_or_refused_with_a_reason",
        "admit returned False for a group with rewards 0, 0.25, 0.5, 0.75",
    ),
    "admit-without-rewards": (
        algorithm(admit="return None if max(s.reward for s in group.samples if s.is_scored) > 0 else 'no success'"),
        "test_a_group_is_admitted_or_refused_with_a_reason",
        "admit, on a group with rewards None, None, None, None, raised ValueError",
    ),
    "admits-in-turn": (
        algorithm(admit="self.seen += 1\nreturn None if self.seen > 3 else 'too early'"),
        "test_admission_depends_on_the_group_alone",
        "admit said 'too early' and None of one group",
    ),
    "no-group": (
        algorithm(capabilities="min_group_size=0"),
        "test_capabilities_mean_something",
        "min_group_size is 0; it must be an integer of at least 1",
    ),
    "unknown-semantics": (
        algorithm(capabilities="min_group_size=2, logprob_semantics=frozenset({'exact'})"),
        "test_capabilities_mean_something",
        "logprob_semantics is frozenset({'exact'})",
    ),
    "no-decisions": (
        algorithm(capabilities="min_group_size=2, decisions=frozenset()"),
        "test_capabilities_mean_something",
        "decisions is frozenset(); it must name at least one of transitions, regressions",
    ),
    "demonstrations-with-behaviour": (
        algorithm(loss="return Loss(loss_N=-d.logprobs_N)", capabilities="source='demonstrations'"),
        "test_properties_have_values_that_the_trainer_knows",
        "old_logprobs is 'behaviour', but nobody generated a demonstration",
    ),
    "properties-change": (
        algorithm(loss="self.constant_length += 1\n" + LOSS),
        "test_properties_do_not_change",
        "constant_length changed after a loss",
    ),
    "dynamic-for-nothing": (
        steered(scale="1.0"),
        "test_a_dynamic_option_takes_effect",
        "the option scale is dynamic, but prices, advantages, admissions and properties are the same with 1.0 and with",
    ),
    "dynamic-read-once": (
        steered(
            keep="Scaled.kept = Scaled.__dict__.get('first', options.scale); Scaled.first = Scaled.kept",
            scale="self.kept",
        ),
        "test_a_dynamic_option_takes_effect",
        "read it from the options that Provider.create is given",
    ),
    "dynamic-for-all-instances": (
        steered(keep="Scaled.kept = options.scale", scale="self.kept"),
        "test_an_instance_goes_by_its_own_options",
        "once an instance was made with another scale, the one before goes by it, too",
    ),
    "dynamic-within-hidden-bounds": (
        steered(
            keep="""self.scale = options.scale
        if options.scale > 9:
            raise ConfigError("scale: too large")"""
        ),
        "test_a_dynamic_option_can_become_all_that_it_allows",
        "the dynamic option scale says that it may become a number > 0, but 100.0 is refused: scale: too large",
    ),
    "dynamic-beyond-telling": (
        steered(validator="lambda *_: None"),
        "test_a_dynamic_option_takes_effect",
        "scale: what <function Options.<lambda> at",
    ),
    "wrong-aggregation": (
        algorithm(declared='aggregation = "mean"'),
        "test_properties_have_values_that_the_trainer_knows",
        "aggregation is 'mean'; it must be one of",
    ),
}
BODIES = {name: body for name, (_, body) in SOUND.items()} | {
    "advantage-against-nothing": "has_other_terms = True",
    "coupled-sequences": "couples_decisions = True",
    "gradient-through-a-clamped-weight": WEIGHTED_FORMULA,
    "not-the-formula": "def reference(self, d): return -d.advantages_N * (d.logprobs_N - d.old_logprobs_N).exp()",
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    sources = {name: source for name, (source, *_) in (SOUND | PLANTED).items()}
    return run_kit("algorithm", sources, bodies=BODIES)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_algorithm_passes(outcomes, name):
    failed = {each.test: each.message for each in outcomes[name] if each.result == "failed"}
    assert failed == {}
    assert sum(each.result == "passed" for each in outcomes[name]) > 20


@pytest.mark.parametrize("name", PLANTED)
def test_the_fault_is_named(outcomes, name):
    _, test, message = PLANTED[name]
    failed = {each.test: each.message for each in outcomes[name] if each.result == "failed"}
    assert message in failed[test]
