"""The kit for algorithms: what a test class sets and overrides, what is declared, and what is made of groups."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias, cast, get_args

import attrs
import pytest

from cosmos_core.config.dynamic import DynamicKey, dynamic_keys
from cosmos_core.config.job import stages
from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.protocols import (
    Algorithm,
    AlgorithmCapabilities,
    AlgorithmContext,
    DatasetCapabilities,
    EngineCapabilities,
    Kind,
    ModelCapabilities,
    ModelFacts,
    Preflight,
    Provider,
    RewardCapabilities,
)
from cosmos_core.protocols.world import DecisionKind
from cosmos_core.run.planning.checks import problems
from cosmos_core.run.planning.parts import Measured, Parts
from cosmos_core.testing.conformance.algorithm.batch import (
    Batch,
    admitted,
    advantages_of,
    calling,
    draw,
    extreme,
    plain,
    priced,
    properties_of,
    rewards_text,
)
from cosmos_core.testing.conformance.algorithm.prices import PriceTests
from cosmos_core.testing.conformance.plugin import Make, PluginConformance, fault, told_by
from cosmos_core.types import JSON, Group, Sample, SampleStatus, Scalar

Seen: TypeAlias = Callable[..., dict[str, str]]
_NUMBERS: Final = (0.0, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 10.0, 100.0)
_FACTORS: Final = (0.01, 0.5, 2.0, 100.0)
_UNSCORED: Final = (SampleStatus.REWARD_FAILED, SampleStatus.REWARD_TIMEOUT)
_ROUNDING: Final = 1e-5
"""Of an advantage, relative to the larger one, or to 1."""
_near = functools.partial(pytest.approx, rel=1e-6, abs=1e-9)


def sampled_groups(capabilities: AlgorithmCapabilities, context: AlgorithmContext) -> tuple[Group, ...]:
    """Groups that `advantages` may be given: each has at least `min_group_size` scored samples, and one."""
    size, fewest = context.group_size, max(1, capabilities.min_group_size)
    rewards: list[list[float | None]] = [
        [index / size for index in range(size)],
        [1.0, *[0.0] * (size - 1)],
        [0.0] * size,
        [0.1] * size,
        [1e6, *[-1e6] * (size - 1)],
        [1.0 + 1e-9 * index for index in range(size)],
    ]
    if size > fewest:
        rewards.append([index / size if index != 1 else None for index in range(size)])
        rewards.append([*[None] * (size - fewest), *[1.0 + index for index in range(fewest)]])
    return tuple(sampled_group(each, context, position) for position, each in enumerate(rewards))


def sampled_group(rewards: Sequence[float | None], context: AlgorithmContext, position: int = 0) -> Group:
    """A group with these rewards; None where a reward failed."""
    samples = []
    for index, reward in enumerate(rewards):
        is_cut = reward is not None and index % 3 == 0
        ended = SampleStatus.TRUNCATED if is_cut else SampleStatus.OK
        sample = Sample(
            index=index,
            status=_UNSCORED[index % 2] if reward is None else ended,
            reward=reward,
            rewards={} if reward is None else {"reward": reward},
            oldest_version=index % 2,
            newest_version=1,
            num_units=context.max_units if is_cut else 1 + index % context.max_units,
            num_prompt_units=3,
        )
        samples.append(sample)
    return Group(position=position, samples=tuple(samples))


class AlgorithmConformance(PriceTests, PluginConformance):
    """Tests that every algorithm must pass; no model and no engine is needed.

    Beside `plugin` and `options`, a test class may set or override:

    Attributes:
        on_policy_scale: The gradient of a decision's price is minus its advantage times this, on-policy; 1.0 unless
            set. None if it is no constant: only the sign is tested.
        ignores: What is asked for without changing the loss, only to be reported: `"old_logprobs"`, `"entropy"`, or
            the role of a frozen model.
        rewards_order_advantages: Whether a sample's advantage rises with its own reward, all else the same, in one
            group at least, and falls in none; True unless set.
        has_other_terms: Whether the loss has a term that moves the policy on-policy whatever the advantage, such as a
            bonus; False unless set.
        context: Fixture: the `AlgorithmContext`; by default groups of 4, completions of 16, staleness 2, and groups
            of one without staleness for demonstrations.
        batch: Fixture: the `Batch` that is priced, as `cosmos_core.testing.conformance.algorithm.batch.draw` makes it;
            by default six random sequences, slightly off-policy.
        groups: Fixture: the groups that `admit` is asked about, and that advantages are computed of if it admits
            them; by default ordinary, equal, extreme and unscored rewards.
        reference: Method `reference(decisions) -> tensor`: the price of each decision by the formula of the paper, in
            float64, with a gradient; by default None, and nothing is compared.
    """

    kind: ClassVar[Kind] = "algorithm"
    rewards_order_advantages: ClassVar[bool] = True

    @pytest.fixture
    def context(self, capabilities: AlgorithmCapabilities) -> AlgorithmContext:
        """The context of a recipe that the algorithm can run in."""
        is_rolled_out = capabilities.source == "rollouts"
        size = max(4, capabilities.min_group_size) if is_rolled_out else 1 + (capabilities.source == "preferences")
        return AlgorithmContext(group_size=size, temperature=1.0, max_units=16, max_staleness=2 * is_rolled_out)

    @pytest.fixture
    def algorithm(self, make: Make) -> Algorithm:
        """An instance."""
        made: Algorithm = make()
        return made

    @pytest.fixture
    def dynamic(self, provider: Provider[Any], options: Mapping[str, JSON]) -> Sequence[DynamicKey]:
        """The options that may change while a run goes on."""
        with calling("reading which options are dynamic"):
            found = dynamic_keys(provider.options, structure(options, provider.options, ""), "")
        return found or pytest.skip("no option is dynamic")

    @pytest.fixture
    def groups(self, capabilities: AlgorithmCapabilities, context: AlgorithmContext) -> Sequence[Group]:
        """Finished groups: ordinary rewards, equal ones, far and near ones, some of them unscored."""
        return sampled_groups(capabilities, context) if capabilities.source == "rollouts" else ()

    @pytest.fixture
    def kept(self, algorithm: Algorithm, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups that `admit` lets pass: a run asks for advantages of no others."""
        if not groups:
            pytest.skip("demonstrations and preferences are in no groups")
        with told_by("test_admitted_groups_have_an_advantage_for_each_scored_sample"):
            kept = tuple(group for group in groups if admitted(algorithm, group) is None)
            advantages_of(algorithm, kept or fault("admit refuses every group"))
            return kept

    @pytest.fixture
    def seen(self, batch: Batch, capabilities: AlgorithmCapabilities, groups: Sequence[Group]) -> Seen:
        """A function that gives all that a trainer can see of an algorithm, by name; -1 asks for it backwards."""
        batches = [batch, draw(capabilities, drift=0.5), extreme(capabilities, (1.0, -1.0))]

        def see(algorithm: Algorithm, order: int = 1) -> dict[str, str]:
            parts = [part for each in batches[::order] for part in priced(algorithm, each)]
            if algorithm.num_demonstrations:
                parts += priced(algorithm, batch, is_imitated=True)
            answers = [(group, admitted(algorithm, group)) for group in groups[::order]]
            kept = [group for group, answer in answers if answer is None]
            found = {
                "prices": [plain(part.loss) for part in parts],
                "gradients": [part.gradient().tolist() for part in parts],
                "admissions": [answer for _, answer in answers],
                "advantages": advantages_of(algorithm, kept) if kept else [],
                **properties_of(algorithm),
            }
            # As text, in which what is no number equals itself.
            return {name: repr(value) for name, value in found.items()}

        return see

    def test_declarations_mean_something(self, algorithm: Algorithm, capabilities: AlgorithmCapabilities) -> None:
        """`cosmos plan` and the trainer act on them without a second look, and some recipe must meet them."""
        smallest: object = capabilities.min_group_size
        is_rolled_out = capabilities.source == "rollouts"
        if not isinstance(smallest, int) or smallest < 1 or (smallest > 1 and not is_rolled_out):
            fault(f"min_group_size is {smallest!r}; it must be an integer of at least 1, and 1 where no group is drawn")
        values = properties_of(algorithm)
        if not is_rolled_out and values["old_logprobs"] == "behaviour":
            fault("old_logprobs is 'behaviour', but nobody generated a demonstration; use 'none' or 'recompute'")
        with calling("planning a recipe with the capabilities that it declares"):
            found = _planned(self.plugin, capabilities)
        if found:
            fault(f"no recipe can use the algorithm as it is declared: {'; '.join(found)}")

    def test_the_same_is_answered_each_time(self, make: Make, trainable: Algorithm, seen: Seen) -> None:
        """In every replica, at different times, after a restart: neither state nor random numbers decide."""
        first, used = seen(trainable), make()
        seen(used, -1)
        for when, again in (("again", trainable), ("in another order", used), ("of another instance", make())):
            other = seen(again)
            if changed := [name for name, value in first.items() if other[name] != value]:
                fault(
                    f"{', '.join(changed)} of the same decisions and groups differ when asked for {when}; they must "
                    "depend on nothing else but the options: keep no state and draw no random numbers"
                )

    def test_dynamic_options_become_what_they_allow_and_count(
        self, make: Make, dynamic: Sequence[DynamicKey], trainable: Algorithm, seen: Seen
    ) -> None:
        """A step that was begun before a change is ended with the options of its beginning, in its own instance."""
        before = seen(trainable)
        for key in dynamic:
            others, found = _others(key), []
            for value in others:
                try:
                    made = make(**{key.key: value})
                except CosmosError as error:
                    fault(
                        f"the dynamic option {key.key} says that it may become {key.allowed}, but {value!r} is "
                        f"refused: {error}; say it with its validator, or declare it without dynamic=True"
                    )
                found.append(seen(made))
            if all(each == before for each in found):
                fault(
                    f"the option {key.key} is dynamic, but prices, advantages, admissions and properties are the same "
                    f"with {key.value!r} and with {', '.join(map(repr, others))}; read it from the options that "
                    "Provider.create is given, or declare it without dynamic=True"
                )
            if seen(trainable) != before:
                fault(
                    f"once an instance was made with another {key.key}, the one before goes by it, too; keep options "
                    "in the instance, neither in its class nor in its module"
                )

    def test_admitted_groups_have_an_advantage_for_each_scored_sample(
        self, algorithm: Algorithm, groups: Sequence[Group], context: AlgorithmContext
    ) -> None:
        """Others are refused with a reason, one without any reward perhaps; something is left to train on."""
        if not groups:
            pytest.skip("demonstrations and preferences are in no groups")
        answers = [admitted(algorithm, group) for group in groups]
        admitted(algorithm, sampled_group([None] * context.group_size, context, len(groups)))
        if None not in answers:
            fault(
                f"admit refuses every group, for example one with {rewards_text(groups[0])}: {answers[0]!r}; return "
                "None for the groups to train on, or override the fixture `groups` with such as it admits"
            )
        advantages_of(algorithm, [group for group, answer in zip(groups, answers, strict=True) if answer is None])

    def test_unscored_samples_take_no_part_in_their_group(
        self,
        algorithm: Algorithm,
        kept: Sequence[Group],
        capabilities: AlgorithmCapabilities,
        context: AlgorithmContext,
    ) -> None:
        """A reward that failed says nothing of the other samples, and is neither a bad answer nor a good one."""
        fewest = max(1, capabilities.min_group_size)
        for group in kept:
            scored = [each for each in group.samples if each.is_scored]
            numbered = [each if each.is_scored else attrs.evolve(each, reward=5.0) for each in group.samples]
            with_rewards, alone = (attrs.evolve(group, samples=tuple(each)) for each in (numbered, scored))
            if (refusal := admitted(algorithm, with_rewards)) is not None:
                fault(
                    f"admit refuses a group for the reward of a sample whose status is reward_failed or "
                    f"reward_timeout: {refusal!r}; look at sample.is_scored, not at whether sample.reward is None"
                )
            if not fewest <= len(scored) < len(group.samples) or admitted(algorithm, alone) is not None:
                continue
            before, after, without = (
                [value for value in advantages_of(algorithm, [each])[0] if value is not None]
                for each in (group, with_rewards, alone)
            )
            if after != _near(before) or without != _near(before):
                fault(
                    f"the scored samples of a group with {rewards_text(group)} have advantages {before}, {after} once "
                    f"the others have rewards, and {without} without the others; leave samples whose is_scored is "
                    "False out of all statistics, never count them as 0"
                )
        if context.group_size > fewest:
            _expect_unscored_are_no_zeros(algorithm, context)

    def test_a_higher_reward_never_lowers_the_advantage_of_its_sample(
        self, algorithm: Algorithm, kept: Sequence[Group], capabilities: AlgorithmCapabilities
    ) -> None:
        """Advantages are all that a policy learns of its rewards; in some group a higher reward must show."""
        if not capabilities.needs_rewards or not self.rewards_order_advantages:
            pytest.skip("needs_rewards or rewards_order_advantages is False")
        shows = False
        for group in kept:
            known = [each.reward for each in group.samples if each.is_scored and each.reward is not None]
            step = max(known) - min(known) or 1.0
            for place, sample in enumerate(group.samples):
                if not sample.is_scored or sample.reward is None:
                    continue
                parts = {name: value + step for name, value in sample.rewards.items()}
                better = attrs.evolve(sample, reward=sample.reward + step, rewards=parts)
                raised = attrs.evolve(group, samples=(*group.samples[:place], better, *group.samples[place + 1 :]))
                if admitted(algorithm, raised) is not None:
                    continue
                before, after = (cast("float", advantages_of(algorithm, [each])[0][place]) for each in (group, raised))
                difference = (after - before) / max(1.0, abs(before), abs(after))
                shows |= difference > _ROUNDING
                if difference < -_ROUNDING:
                    fault(
                        f"a sample of a group with {rewards_text(group)} has an advantage of {before:g}, and of "
                        f"{after:g} once its own reward is {better.reward:g}; is the sign wrong? Set "
                        "rewards_order_advantages = False in the test class if it is meant"
                    )
        if not shows:
            fault(
                "no sample's advantage rises with its own reward, in any group; compute advantages from "
                "sample.reward, or set rewards_order_advantages = False in the test class if they come from elsewhere"
            )


def _expect_unscored_are_no_zeros(algorithm: Algorithm, context: AlgorithmContext) -> None:
    """Fault advantages that an unscored sample changes as a reward of 0 does."""
    size = context.group_size
    matters, as_zero = False, True
    for sign in (1.0, -1.0):
        others = [sign * (1.0 + index / size) for index in range(1, size)]
        compared = [sampled_group([first, *others], context) for first in (None, 0.0, 3.0 * sign)]
        if any(admitted(algorithm, group) is not None for group in compared):
            continue
        unscored, zero, far = (advantages_of(algorithm, [group])[0][1:] for group in compared)
        matters |= zero != _near(far)
        as_zero &= unscored == _near(zero)
    if matters and as_zero:
        fault(
            "an unscored sample changes the advantages of its group as a reward of 0 does; take means over the "
            "samples whose is_scored is True, and divide by their number, not by the group's size"
        )


def _others(key: DynamicKey) -> list[Scalar]:
    """Values that an option may become, other than the one it has."""
    wanted: list[Scalar] = [True, False, "another", *key.choices, None]
    if isinstance(key.value, int | float):
        wanted += [key.value * factor for factor in _FACTORS]
    wanted += [*_NUMBERS, *(bound for bound in (key.at_least, key.at_most) if bound is not None)]
    wanted += [int(value) for value in wanted if type(value) is float]
    taken: dict[Scalar, None] = {}
    for value in wanted:
        with contextlib.suppress(ConfigError):
            taken[key.taken(value)] = None
    taken.pop(key.value, None)
    return list(taken)


def _planned(plugin: str, capabilities: AlgorithmCapabilities) -> list[str]:
    """Problems of planning a step with these capabilities, beside parts that give whatever they are asked for."""
    kinds = capabilities.payload_kinds
    # Any temperature but 1: at 1 every sort of log-probs is the same.
    sampling = {"max_units": 16, "temperature": 0.7}
    chosen = {"run": {"name": "conformance", "steps": 1}, "model": {"config": {}}, "dataset": {"plugin": "any"}}
    rollout = {"group_size": max(2, capabilities.min_group_size), "sampling": sampling}
    policy = {"optimizer": {"lr": 1e-3}}
    scored = {"algorithm": {"plugin": plugin}, "reward": [{"plugin": "any"}], "policy": policy, "rollout": rollout}
    recipe = structure({**chosen, **scored}, Recipe)
    facts = ModelFacts(architecture="Any", num_parameters=1, num_layers=1, hidden_size=1, context_length=1 << 20)
    parts = Parts(
        model=ModelCapabilities(payload_kinds=kinds),
        facts=facts,
        stages=[(stage, capabilities) for stage in stages(recipe)],
        rewards=[RewardCapabilities(payload_kinds=kinds)],
        dataset=DatasetCapabilities(demonstrations=True),
        engine=None,
        num_train_rows=10,
        num_heldout_rows=10,
        measured=Measured(num_rows=10, num_demonstrations=10, num_preferences=10, shortest_prompt=4, longest_prompt=8),
    )
    found = []
    for semantics, decisions in itertools.product(("processed", "raw"), get_args(DecisionKind)):
        engine = EngineCapabilities(logprob_semantics=semantics, payload_kinds=kinds)
        told = Preflight(decisions=decisions)
        found.append(problems(recipe, attrs.evolve(parts, engine=engine, preflight=told)))
    return min(found, key=len)
