"""Faults of algorithms in what they make of groups of samples: which they admit, and what advantages they give."""

from tests.nightly.kit.faulty_algorithm import AlgorithmFaults, algorithm

UNSCORED_AS_ZERO = """
mean = sum(reward or 0.0 for reward in rewards) / len(rewards)
return [None if reward is None else reward - mean for reward in rewards]
"""
SOUND = {
    "five-of-a-prompt": (algorithm(capabilities="min_group_size=5"), ""),
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
}
PLANTED = {
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
        "test_a_higher_reward_never_lowers_the_advantage_of_its_sample",
        "no sample's advantage rises with its own reward, in any group",
    ),
    "admits-nothing": (
        algorithm(admit="return 'no'"),
        "test_admitted_groups_have_an_advantage_for_each_scored_sample",
        "admit refuses every group, for example one with rewards 0, 0.25, 0.5, 0.75: 'no'",
    ),
    "admits-by-a-failed-reward": (
        algorithm(admit="return 'lucky' if any(s.reward == 5.0 for s in group.samples) else None"),
        "test_unscored_samples_take_no_part_in_their_group",
        "admit refuses a group for the reward of a sample whose status is reward_failed",
    ),
    "unscored-as-zero": (
        algorithm(advantages=UNSCORED_AS_ZERO),
        "test_unscored_samples_take_no_part_in_their_group",
        "leave samples whose is_scored is False out of all statistics",
    ),
    "unscored-as-zero-by-constant": (
        algorithm(advantages="return [None if r is None else r - sum(x or 0 for x in rewards) / 4 for r in rewards]"),
        "test_unscored_samples_take_no_part_in_their_group",
        "changes the advantages of its group as a reward of 0 does",
    ),
    "unscored-trained-on": (
        algorithm(advantages="return [(reward or 0.0) - 0.5 for reward in rewards]"),
        "test_admitted_groups_have_an_advantage_for_each_scored_sample",
        "advantages gave -0.5 to an unscored sample in a group with rewards 0, None, 0.5, 0.75; give None",
    ),
    "reward-of-a-failed-sample": (
        algorithm(advantages="rewards = [sample.reward for sample in samples]"),
        "test_unscored_samples_take_no_part_in_their_group",
        "look at sample.is_scored",
    ),
    "not-a-number": (
        algorithm(
            advantages="return [None if r is None else r - max(rewards, key=bool) * float('inf') for r in rewards]"
        ),
        "test_admitted_groups_have_an_advantage_for_each_scored_sample",
        "to a scored sample in a group with rewards",
    ),
    "divides-by-nothing": (
        algorithm(capabilities="min_group_size=1"),
        "test_admitted_groups_have_an_advantage_for_each_scored_sample",
        "raised ZeroDivisionError",
    ),
    "random-advantages": (
        algorithm(advantages="return [None if reward is None else random.random() for reward in rewards]"),
        "test_the_same_is_answered_each_time",
        "advantages of the same decisions and groups differ when asked for again",
    ),
    "advantages-of-its-own": (
        algorithm(advantages="self.seen = self.seen or random.random()\nreturn [r and r * self.seen for r in rewards]"),
        "test_the_same_is_answered_each_time",
        "advantages of the same decisions and groups differ",
    ),
    "writes-groups": (
        algorithm(advantages="samples[0].rewards.clear()"),
        "test_admitted_groups_have_an_advantage_for_each_scored_sample",
        "changed what it was given; work on a copy",
    ),
    "admits-with-a-boolean": (
        algorithm(admit="return False"),
        "test_admitted_groups_have_an_advantage_for_each_scored_sample",
        "admit returned False for a group with rewards 0, 0.25, 0.5, 0.75",
    ),
    "admit-without-rewards": (
        algorithm(admit="return None if max(s.reward for s in group.samples if s.is_scored) > 0 else 'no success'"),
        "test_admitted_groups_have_an_advantage_for_each_scored_sample",
        "admit, on a group with rewards None, None, None, None, raised ValueError",
    ),
    "admits-in-turn": (
        algorithm(admit="self.seen += 1\nreturn None if self.seen > 3 else 'too early'"),
        "test_the_same_is_answered_each_time",
        "of the same decisions and groups differ when asked for again",
    ),
}


class TestGroups(AlgorithmFaults):
    sound = SOUND
    planted = PLANTED
