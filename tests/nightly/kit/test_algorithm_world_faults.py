"""Faults of algorithms that imitate beside rollouts, that blend predictions, and that price sequences which are cut."""

from tests.nightly.kit.faulty_algorithm import LOSS, AlgorithmFaults, algorithm

IMITATION = """
class Imitator(Algorithm):
    {declared}

    def imitation(self, d):
        {imitation}
"""
NEAR_DATA = "return Loss(loss_N=-0.1 * d.logprobs_N, metrics={'nll': -d.logprobs_N.detach()})"


def imitating(imitation=NEAR_DATA, declared="num_demonstrations = 1", capabilities="min_group_size=2", loss=LOSS):
    source = algorithm(capabilities=capabilities, loss=loss) + IMITATION.format(declared=declared, imitation=imitation)
    return source.replace("Provider(create=Algorithm,", "Provider(create=Imitator,")


BLENDS = """
both = d.frozen["average"].blended
good_N = (d.advantages_N / 10 + 0.5).clamp(0, 1)
errors_NK = both.squared_NK / both.absolute_NK.clamp_min(1e-5)
return Loss(loss_N=5 * (good_N * errors_NK[:, 0] + (1 - good_N) * errors_NK[:, 1]))
"""
CONSULTS = 'old_logprobs = "none"; skips_zero_advantage = False; consults = {"average": Blend(shares=(1.0, -1.0))}'


def blending(loss=BLENDS, declared=CONSULTS):
    return "from cosmos_core.protocols.frozen import Blend, Divergence\n" + algorithm(loss=loss, declared=declared)


SOUND = {
    "imitating": (imitating(), ""),
    "imitating-nothing": (imitating(declared="num_demonstrations = 0"), ""),
    "imitating-tokens": (imitating(capabilities="min_group_size=2, payload_kinds=frozenset({'tokens'})"), ""),
    "blending": (blending(), "on_policy_scale = None; has_other_terms = True"),
}
PLANTED = {
    "half-a-demonstration": (
        imitating(declared="num_demonstrations = 0.5"),
        "test_demonstrations_become_likelier",
        "num_demonstrations is 0.5",
    ),
    "other-count": (
        imitating(declared="made = 0\n    num_demonstrations = property(lambda self: id(self))"),
        "test_the_same_is_answered_each_time",
        "num_demonstrations of the same decisions and groups differ",
    ),
    "unlikelier": (
        imitating("return Loss(loss_N=d.logprobs_N)"),
        "test_demonstrations_become_likelier",
        "must not cost more",
    ),
    "summed-demonstrations": (
        imitating("return Loss(loss_N=-d.logprobs_N.sum())"),
        "test_demonstrations_become_likelier",
        "imitation gave a float32 tensor of shape []",
    ),
    "needs-frozen": (
        imitating("return Loss(loss_N=-d.logprobs_N + d.frozen['reference'].logprobs_N)"),
        "test_demonstrations_become_likelier",
        "imitation, on 22 decisions",
    ),
    "core-metric": (
        imitating("return Loss(loss_N=-d.logprobs_N, metrics={'loss': d.logprobs_N.detach()})"),
        "test_demonstrations_become_likelier",
        "the metric 'loss' has a name of the core's own",
    ),
    "overflows": (
        imitating("return Loss(loss_N=(-d.logprobs_N).exp())"),
        "test_demonstrations_become_likelier",
        "log-prob -100",
    ),
    "centred": (
        imitating("return Loss(loss_N=-(d.logprobs_N - d.logprobs_N.mean().detach()) - d.logprobs_N)"),
        "test_a_step_does_not_depend_on_how_its_batch_lies",
        "price each demonstration from its own sequence alone",
    ),
    "twice": (
        imitating(capabilities="source='demonstrations'", loss="return Loss(loss_N=-d.logprobs_N)").replace(
            'old_logprobs = "behaviour"', 'old_logprobs = "none"'
        ),
        "test_demonstrations_become_likelier",
        "learns from demonstrations: these are its batch",
    ),
    "asks-words": (
        blending(declared=CONSULTS.replace("Blend(shares=(1.0, -1.0))", "'blend'")),
        "test_declarations_mean_something",
        "None, a Divergence or a Blend",
    ),
    "asks-twice": (
        blending(declared=CONSULTS.replace("consults = {", "consults = {'teacher': Divergence(kind='jsd'), ")),
        "test_declarations_mean_something",
        "one is possible",
    ),
    "blends-unused": (
        blending(loss="return Loss(loss_N=-d.advantages_N * d.logprobs_N)"),
        "test_what_it_asks_for_is_used",
        "average is asked for, but gradients are the same",
    ),
}


class TestWorlds(AlgorithmFaults):
    sound = SOUND
    planted = PLANTED

    def test_demonstrations_are_priced_where_they_are_imitated(self, outcomes):
        for name in self.sound:
            passed = {each.test for each in outcomes[name] if each.result == "passed"}
            assert ("test_demonstrations_become_likelier" in passed) == (name in {"imitating", "imitating-tokens"}), (
                name
            )
