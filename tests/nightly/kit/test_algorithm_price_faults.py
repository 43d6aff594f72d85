"""Faults of algorithms in the prices of decisions: their gradients, what they read, how they split."""

from tests.nightly.kit.faulty_algorithm import (
    CONSULTING,
    LOSS,
    NEAR,
    REINFORCE,
    SEQUENCE_RATIO,
    AlgorithmFaults,
    algorithm,
)

OF_TOKENS = "min_group_size=2, payload_kinds=frozenset({'tokens'})"
WEIGHTED_BY_ENTROPY = "return Loss(loss_N=-d.advantages_N * d.logprobs_N * (1 + d.entropy_N.clamp(max=5)))"
STRENGTH = "return Loss(loss_N=-d.advantages_N * d.advantages_N.abs() * d.logprobs_N)"
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


def altered(old, new):
    """The sound loss with something else in a place of it."""
    assert old in LOSS
    return LOSS.replace(old, new)


SOUND = {
    "clipped": (algorithm(), ""),
    "reinforce": (algorithm(loss=REINFORCE, **FREE), "def reference(self, d): return -d.advantages_N * d.logprobs_N"),
    "recomputed": (algorithm(declared='old_logprobs = "recompute"'), ""),
    "latents": (algorithm(capabilities="min_group_size=2, payload_kinds=frozenset({'latents'})"), ""),
    "sequence-ratio": (algorithm(loss=SEQUENCE_RATIO, capabilities=OF_TOKENS), ""),
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
        ).replace("import torch", "import torch\nfrom cosmos_core.protocols.frozen import Divergence", 1),
        "has_other_terms = True",
    ),
    "preferences": (
        algorithm(
            loss="return Loss(loss_N=-d.advantages_N * d.logprobs_N)",
            declared='old_logprobs = "none"; skips_zero_advantage = False',
            capabilities="source='preferences'",
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
        "is 2 times minus the advantage for one decision and 2 times for another, expected 1 times",
    ),
    "wrong-scale-by-length": (
        algorithm(loss=altered("-d", "-1 / torch.bincount(d.sequence_N)[d.sequence_N] * d")),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "is 0.142857 times minus the advantage for one decision and 1 times for another, expected 1 times for each",
    ),
    "biased-advantage": (
        algorithm(loss=altered("-d.advantages_N", "-(d.advantages_N + 0.1)"), declared="skips_zero_advantage = False"),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "a decision with advantage 0 has a gradient of -0.1 at advantage 0",
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
        "test_the_loss_equals_its_reference",
        "and its reference",
    ),
    "mean-inside": (
        algorithm(loss=altered("-d.advantages_N * ratio_N", "-d.advantages_N * ratio_N / len(ratio_N)")),
        "test_a_step_does_not_depend_on_how_its_batch_lies",
        "with two micro-batches; price each decision from its own sequence alone",
    ),
    "whitened-in-the-micro-batch": (
        algorithm(loss=altered("-d.advantages_N", "-(d.advantages_N / (d.advantages_N.abs().mean() + 1e-6))")),
        "test_a_step_does_not_depend_on_how_its_batch_lies",
        "with two micro-batches; price each decision from its own sequence alone",
    ),
    "on-the-first-micro-batch": (
        algorithm(
            loss="""
is_whole = isinstance(self.seen, torch.Tensor) and len(self.seen) >= len(d.advantages_N)
first = self.seen = self.seen if is_whole else d.advantages_N
return Loss(loss_N=-first[:len(d.logprobs_N)] * (d.logprobs_N - d.old_logprobs_N).clamp(-20, 20).exp())
"""
        ),
        "test_a_step_does_not_depend_on_how_its_batch_lies",
        "with two micro-batches; price each decision from its own sequence alone",
    ),
    "gradient-through-a-clamped-weight": (
        algorithm(loss=WEIGHTED.replace(".detach()", "").replace(" * d.logprobs_N)", ")")),
        "test_the_loss_equals_its_reference",
        "the price of a decision is",
    ),
    "by-place": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N * (1 + d.sequence_N), metrics")),
        "test_a_step_does_not_depend_on_how_its_batch_lies",
        "with two micro-batches; price each decision",
    ),
    "scalar": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N).sum(), metrics").replace("loss_N=-", "loss_N=(-")),
        "test_every_decision_gets_a_price",
        "loss gave a float32 tensor of shape [] for 22 decisions",
    ),
    "coupled-sequences": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N * ratio_N.mean() / ratio_N.mean().detach(), metrics")),
        "test_a_step_does_not_depend_on_how_its_batch_lies",
        "with two micro-batches; price each decision from its own sequence alone",
    ),
    "coupled": (
        algorithm(loss=SEQUENCE_RATIO),
        "test_a_step_does_not_depend_on_how_its_batch_lies",
        "with sequences cut after two decisions; price each decision",
    ),
    "unbounded-ratio": (
        algorithm(loss=altered(".clamp(-20, 20)", "")),
        "test_every_decision_gets_a_price",
        "bound log ratios (clamp(-20, 20)) before their exponential",
    ),
    "zero-advantage-not-skipped": (
        algorithm(loss=altered("ratio_N, metrics", "ratio_N + 0.1 * (d.logprobs_N - d.old_logprobs_N) ** 2, metrics")),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "skips_zero_advantage is declared, but a decision with advantage 0 has a gradient of",
    ),
    "advantage-against-nothing": (
        algorithm(
            loss=altered("-d.advantages_N * ratio_N", "-(d.advantages_N + (d.advantages_N == 0)) * ratio_N"),
            declared="skips_zero_advantage = False",
        ),
        "test_minimising_the_loss_makes_good_decisions_likelier",
        "a policy term must vanish with its advantage",
    ),
    "ratio-against-itself": (
        algorithm(loss=altered("d.old_logprobs_N", "d.logprobs_N.detach()")),
        "test_what_it_asks_for_is_used",
        "old_logprobs is asked for, but gradients are the same whatever it is; compare log-probs with",
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
        "test_what_it_asks_for_is_used",
        "entropy is asked for, but gradients are the same whatever it is; make decisions.entropy_N a factor",
    ),
    "entropy-bonus-without-gradient": (
        algorithm(
            loss=altered("* ratio_N,", "* ratio_N - 0.01 * d.entropy_N.detach(),"), declared="needs_entropy = True"
        ),
        "test_what_it_asks_for_is_used",
        "has a gradient: detached, it moves nothing",
    ),
    "reference-for-nothing": (
        algorithm(declared='consults = {"reference": None}'),
        "test_what_it_asks_for_is_used",
        "reference is asked for, but gradients are the same whatever it is; use decisions.frozen['reference']",
    ),
    "reference-without-asking": (
        algorithm(loss=NEAR, declared="skips_zero_advantage = False"),
        "test_every_decision_gets_a_price",
        "raised KeyError: 'reference'",
    ),
    "reference-as-a-constant": (
        algorithm(loss=NEAR.replace("- d.logprobs_N).clamp", "- d.logprobs_N.detach()).clamp"), declared=CONSULTING),
        "test_what_it_asks_for_is_used",
        "reference is asked for, but gradients are the same",
    ),
    "learns-its-scale": (
        algorithm(loss="self.seen = self.seen or d.logprobs_N.min().item()\n" + altered("-d", "self.seen * d")),
        "test_the_same_is_answered_each_time",
        "prices, gradients of the same decisions and groups differ when asked for in another order",
    ),
    "remembers": (
        algorithm(loss="self.seen += 1\n" + altered("-d.advantages_N", "-(1 + self.seen) / 2 * d.advantages_N")),
        "test_the_same_is_answered_each_time",
        "prices, gradients of the same decisions and groups differ when asked for again",
    ),
    "writes-its-inputs": (
        algorithm(loss=altered("-d.advantages_N", "-d.advantages_N.clamp_(-1, 1)")),
        "test_every_decision_gets_a_price",
        "loss changed decisions.advantages_N in place",
    ),
    "metric-with-gradient": (
        algorithm(loss=altered("ratio_N.detach()", "ratio_N")),
        "test_every_decision_gets_a_price",
        "the metric 'ratio' carries a gradient",
    ),
    "metric-averaged": (
        algorithm(loss=altered("ratio_N.detach()", "ratio_N.detach().mean()")),
        "test_every_decision_gets_a_price",
        "the metric 'ratio' is a float32 tensor of shape [] for 22 decisions",
    ),
    "metric-infinite": (
        algorithm(loss=altered("ratio_N.detach()", "(d.old_logprobs_N - d.logprobs_N.detach()).exp()")),
        "test_every_decision_gets_a_price",
        "the metric 'ratio' of a decision is inf at advantage 0, log-prob -100, old log-prob 0",
    ),
    "metric-of-the-core": (
        algorithm(loss=altered('"ratio"', '"loss"')),
        "test_every_decision_gets_a_price",
        "the metric 'loss' has a name of the core's own",
    ),
}
BODIES = {
    "advantage-against-nothing": "has_other_terms = True",
    "gradient-through-a-clamped-weight": WEIGHTED_FORMULA,
    "not-the-formula": "def reference(self, d): return -d.advantages_N * (d.logprobs_N - d.old_logprobs_N).exp()",
}


class TestPrices(AlgorithmFaults):
    sound = SOUND
    planted = PLANTED
    bodies = BODIES
