"""Says why a run does not learn: pure functions of its state, of which each sees one thing, or says nothing.

What is said is of the newest steps of the running stage, so that a finding which no longer holds is gone.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs

from cosmos_core.config.training import USUAL_LR
from cosmos_core.control.live.figures import NEWEST_STEPS
from cosmos_core.control.live.time_spent import POLICY
from cosmos_core.control.machine.changes import first_step
from cosmos_core.control.machine.progress import best_checkpoint
from cosmos_core.control.machine.records import StepRecord, merits
from cosmos_core.control.machine.state import State
from cosmos_core.types import SampleStatus

LEAST_STEPS: Final = 5
"""Steps that something is said of: chance explains fewer, and a tiny run has made them within seconds."""
LEAST_PROMPTS: Final = 16
"""Prompts, or samples, that something is said of where no step may have been made: a batch of a small recipe."""
MOST: Final = 0.5
MANY: Final = 0.1
"""Share of stale prompts above which generation is wasted; some are dropped whenever a pool starts again."""
NEARLY_ALL: Final = 0.9
"""Share of groups of equal rewards above which a batch has hardly a gradient. Half is usual of rewards of 0 and 1."""
LEAST_MOVE: Final = 1e-6
"""AdamW moves a weight by about the learning rate a step; a usual one is 0.02, of which this is 0.005 %."""
COLLAPSED: Final = 0.1
"""Share of the first entropy below which hardly anything new is tried; it may well halve in a run that learns."""
FAR: Final = 2.0
"""Factor from 1 beyond which a mean ratio is of another policy: bounds of clipping are near 1.2."""
DECLINES: Final = 3
"""Evaluations in a row that each got worse than the one before: of rows that are the same, noise makes two."""
FALLEN: Final = 0.1
"""Share of a held-out score or loss, or of a reward, that a fall takes: less is a trifle, however sure."""
ERRORS: Final = 2.0
"""Standard errors of the difference of two held-out scores below which chance explains it."""
LOST: Final = 0.75
"""Share of what was gained, and of the spread of a prompt's rewards, beyond which a fall is no change of the rows."""
LEAST_BEFORE: Final = 3
"""Steps before a fall: a learning rate that is far too high takes no more."""
SURE: Final = 6.0
"""Standard errors beyond which the rewards of two windows differ, of which the worst of all splits is looked at."""
RISEN: Final = 0.5
"""Share of the first loss by which the newest ones, all above it, show that steps lead away, if noise does not."""
BEYOND: Final = 10.0
EVEN: Final = 12.0
"""Multiple of the first loss, and loss of who guesses evenly among 160,000 tokens: noise makes no more of both."""

COSTLY: Final = 0.25
"""Share of the time of the newest steps that nothing but scores may take; those of a math answer take 1 %."""
START_S: Final = 5.0
"""The first scores wait so long, at most, until reward processes have started."""

_FAILURES: Final = frozenset(status.value for status in SampleStatus if not status.is_scored)
_LATE: Final = SampleStatus.REWARD_TIMEOUT.value


@attrs.frozen
class Finding:
    """A reason why a run does not learn: a word for it, what is seen with its figures, and the keys to change."""

    code: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}; {self.advice}"


@attrs.frozen
class _Seen:
    """The state, the steps that are known of the running stage, and the newest and the first of these."""

    state: State
    steps: Sequence[StepRecord]
    newest: Sequence[StepRecord]
    first: Sequence[StepRecord]

    def __str__(self) -> str:
        return f"the newest {len(self.newest)} steps" if len(self.newest) > 1 else "the first step"

    @functools.cached_property
    def fall(self) -> Finding | None:
        """A reward that fell, or a loss that rose, in the running stage or the warm-up before it."""
        return _risen(self) or _fallen(self)

    @property
    def lr(self) -> str:
        """The key of the running stage's learning rate."""
        return f"{'policy' if self.state.stage is self.state.settings.main else 'warmup'}.optimizer.lr"

    @functools.cached_property
    def equal(self) -> Counter[float]:
        """Groups of the newest steps in which all rewards are equal, by that reward."""
        return sum((Counter(each.equal) for each in self.newest), Counter())

    @property
    def advice_on_equal(self) -> str:
        """Advice where rewards are equal: by whether nearly all are one value, and it is the highest of the run."""
        ((value, number),) = self.equal.most_common(1)
        if number < NEARLY_ALL * self.equal.total():
            return "change the reward, the rows (dataset), rollout.sampling.temperature or rollout.group_size"
        look = "look at some (cosmos samples RUN): if answers are right,"
        highest = max(kind for each in self.steps for kind in (each.reward or 0.0, *each.equal))
        if value <= 0.0 or value < highest * (1.0 - 1e-9):
            return f"{look} mend the reward; if none is, take easier rows (dataset), or raise rollout.group_size"
        # It need not be that of a right answer: the form alone may be rewarded, or all by a constant.
        return f"{look} the rows are too easy: take harder ones (dataset); if not, mend the reward, or take easier rows"

    @property
    def advice_on_unscored(self) -> str:
        """Advice where samples have no reward, by what failed."""
        where = "logs/rollout-*.jsonl have where it failed"
        if any(kind.startswith("environment") for kind in self.state.status_details if kind in _FAILURES):
            return f"mend the environment or agent ({where}), or raise its environment.timeout_s or agent.timeout_s"
        return f"mend the reward ({where}), or raise reward.N.timeout_s"

    @functools.cached_property
    def gains(self) -> list[tuple[StepRecord, float]]:
        """Steps with their rewards or, of demonstrations, minus their losses."""
        is_scored = self.state.stage.uses_rollouts
        known = ((each, each.reward if is_scored else -each.metrics.get("loss", math.nan)) for each in self.steps)
        return [(each, gain) for each, gain in known if gain is not None and math.isfinite(gain)]

    @property
    def has_learned(self) -> bool:
        """True if the reward is above that of the first steps: then it is no wonder that little is left to learn."""
        before, now = (_mean(each.reward for each in records) for records in (self.first, self.newest))
        return before is not None and now is not None and now > before

    @property
    def dropped(self) -> dict[str, int]:
        """Prompts dropped since the newest steps began, by reason: since the stage did, if there are not many."""
        before = self.newest[0].dropped if len(self.newest) == NEWEST_STEPS else {}
        return {reason: count - before.get(reason, 0) for reason, count in self.state.ledger.dropped.items()}

    @property
    def num_prompts(self) -> int:
        """Prompts that the newest steps consumed, and those dropped since they began."""
        return sum(each.num_groups for each in self.newest) + sum(self.dropped.values())


def findings(state: State) -> tuple[Finding, ...]:
    """All that explains, now, why the run does not learn."""
    steps = [each for each in state.steps if each.stage == state.stage_index]
    seen = _Seen(state, steps, steps[-NEWEST_STEPS:], steps[:LEAST_STEPS])
    looks = _OF_PROMPTS if len(seen.newest) < LEAST_STEPS else _OF_PROMPTS | _OF_STEPS
    told = {code: (text, advice) for code, (look, advice) in looks.items() if (text := look(seen))}
    return tuple(
        Finding(code, text, advice.format(seen=seen))
        for code, (text, advice) in told.items()
        if "collapsed" not in told or code not in _CONSEQUENCES
    )


def _risen(seen: _Seen) -> Finding | None:
    """The loss that training only made worse: of the running stage, or of the warm-up that its rollouts began with."""
    state, uses_rollouts = seen.state, seen.state.stage.uses_rollouts
    if uses_rollouts and seen.has_learned:
        return None
    index = state.stage_index - uses_rollouts
    losses = [each.metrics.get("loss", math.nan) for each in state.steps if each.stage == index]
    known = [loss for loss in losses if math.isfinite(loss)]
    if len(known) < 2 * LEAST_STEPS:
        return None
    first, newest = known[0], known[len(known) // 2 :][-NEWEST_STEPS:]
    rise = statistics.fmean(newest) - first
    if min(newest) <= first or rise <= RISEN * abs(first):
        return None
    # The first loss may be low by chance. Where weights are lost at once, what follows is as noisy as it is high.
    noise = statistics.stdev(known[1:][-NEWEST_STEPS:])
    if rise <= SURE * noise * math.sqrt(1 + 1 / len(newest)) and min(newest) <= max(EVEN, BEYOND * first):
        return None
    is_main = index == len(state.settings.stages) - 1
    table, where = ("policy", "") if is_main else ("warmup", " of the warm-up")
    text = f"the loss rose from {first:.3g} in the first step{where} to {statistics.fmean(newest):.3g}"
    remedy = _earlier(state, state.settings.stages[index].first_version)
    return Finding("collapsed", text, f"lower {table}.optimizer.lr; {remedy}")


def _fallen(seen: _Seen) -> Finding | None:
    """The fall that splits the rewards (or minus the losses) of the stage best, if they have not come back."""
    state, gains = seen.state, [gain for _, gain in seen.gains]
    sums = [0.0, *itertools.accumulate(gains)]

    def size(split: int) -> float:
        number, left = min(split, NEWEST_STEPS), len(gains) - split
        fall = (sums[split] - sums[split - number]) / number - (sums[-1] - sums[split]) / left
        return fall * math.sqrt(number * left / (number + left))

    splits = range(LEAST_BEFORE, len(gains) - LEAST_STEPS + 1)
    if not splits:
        return None
    split = max(splits, key=size)
    before, after = gains[max(0, split - NEWEST_STEPS) : split], gains[split:][-NEWEST_STEPS:]
    high, low, start = (statistics.fmean(each) for each in (before, after, gains[: min(split, LEAST_STEPS)]))
    if high - low <= max(LOST * (high - start), FALLEN * abs(high)):
        return None
    noise = max(statistics.stdev(each) for each in (before, after))
    chance = SURE * noise * math.sqrt(1 / len(before) + 1 / len(after))
    if high - low <= max(chance, LOST * noise * math.sqrt(seen.steps[-1].num_groups)):
        return None
    last, since = seen.gains[split - 1][0], seen.gains[split][0].step
    mend, changed, sign = f"lower {seen.lr}", "", 1 if state.stage.uses_rollouts else -1
    for change in state.changes:
        step = first_step(state.settings, change.key, change.step)
        if since - NEWEST_STEPS <= step <= since:
            changed = f" ({change.key} was set to {change.after} at step {step})"
            mend = mend if change.key in mend else f"set {change.key} back to {change.before}"
    text = f"the {'reward fell' if sign == 1 else 'loss rose'} from {sign * high:.3g} to {sign * low:.3g}"
    # Its samples, drawn with the weights of the step before it or older ones, were still good; later weights are not.
    remedy = _earlier(state, last.step - 1 - last.staleness_max)
    return Finding("collapsed", f"{text} since step {since}{changed}", f"{mend}; {remedy}")


def _earlier(state: State, sound: int) -> str:
    """The checkpoint to go on from, of those of the last sound step or before."""
    kept, best = [each for each in state.checkpoints.kept if each <= sound], best_checkpoint(state)
    if not kept:
        return "begin anew, as no checkpoint is from before"
    start = best if best in kept else max(kept)
    return f"go on from an earlier checkpoint: cosmos run --resume RUN --from step-{start}"


def _unscored(seen: _Seen) -> str:
    size = seen.state.settings.rollout_group_size
    lost = sum(sum(each.failed.values()) for each in seen.newest) + size * seen.dropped.get("unscored", 0)
    if lost < LEAST_PROMPTS or lost <= MOST * size * seen.num_prompts:
        return ""
    why = next((f" ({kind}: {why})" for kind, why in seen.state.status_details.items() if kind in _FAILURES), "")
    return f"{lost:,} of the newest {size * seen.num_prompts:,} samples have no reward{why}"


def _scores(seen: _Seen) -> str:
    took_s = sum(each.metrics.get(name, 0.0) for each in seen.newest for names in POLICY.values() for name in names)
    # Scores that are late cost nothing while the policy trains.
    waited_s = sum(min(each.awaited_s, each.metrics.get("wait_s", 0.0)) for each in seen.newest)
    late = sum(each.failed.get(_LATE, 0) for each in seen.newest)
    # Steps may take an hour where scores hang.
    if waited_s <= max(START_S, COSTLY * took_s) or (len(seen.newest) < LEAST_STEPS and late < LEAST_PROMPTS):
        return ""
    number = sum(each.num_samples + sum(each.failed.values()) for each in seen.newest)
    details = seen.state.status_details
    told = [f"{late:,} of {number:,} samples were late ({details[_LATE]})"] if late and _LATE in details else []
    told += [f"{what}: {details[what]}" for what in seen.state.troubles if "reward" in what]
    return "; ".join((f"{waited_s / took_s:.0%} of the time of {seen} went by waiting for scores", *told))


def _stale(seen: _Seen) -> str:
    number = seen.dropped.get("stale", 0)
    is_much = number >= LEAST_PROMPTS and number > MANY * seen.num_prompts
    return f"{number:,} of the newest {seen.num_prompts:,} prompts were too old to train on" if is_much else ""


def _dropped(seen: _Seen) -> str:
    dropped = {reason: count for reason, count in seen.dropped.items() if reason not in ("stale", "unscored")}
    number, most = sum(dropped.values()), max(dropped, key=dropped.__getitem__, default="")
    if number < LEAST_PROMPTS or number <= NEARLY_ALL * seen.num_prompts:
        return ""
    why = seen.state.status_details.get(most, most)
    return f"{number:,} of the newest {seen.num_prompts:,} prompts were dropped, most of them for {why!r}"


def _equal(seen: _Seen) -> str:
    now, before = (
        sum(sum(each.equal.values()) for each in records) / max(1, sum(each.num_groups for each in records))
        for records in (seen.newest, seen.first)
    )
    if now < NEARLY_ALL or (seen.has_learned and before < NEARLY_ALL):
        return ""
    values = ", ".join(f"{value:.3g} in {number:,}" for value, number in seen.equal.most_common(2))
    where = f"in {now:.0%} of the groups of {seen} ({values})"
    return f"all rewards are equal {where}, so advantages are 0: nothing to learn from"


def _truncated(seen: _Seen) -> str:
    shares = [each.truncated for each in seen.newest if each.reward is not None]
    share, before = (_mean(each) or 0.0 for each in (shares, shares[: 1 - LEAST_STEPS]))
    # Since fewer steps than a fall takes to be told, it may be the consequence of one.
    is_much = min(share, before) > MOST
    return f"{share:.0%} of the completions of {seen} were cut off at the longest length" if is_much else ""


def _untrained(seen: _Seen) -> str:
    number = sum(each.skipped for each in seen.newest)
    if number > MOST * len(seen.newest):
        return f"the gradient of {number} of {seen} was not finite, so that the weights stayed as they were"
    is_idle = not any(each.num_trained for each in seen.newest) and not _equal(seen)
    return f"no sample of {seen} was trained on: all advantages are 0, or all rows of no use" if is_idle else ""


def _learning_rate(seen: _Seen) -> str:
    rates = [each.metrics["lr"] for each in (*seen.first, *seen.newest) if "lr" in each.metrics]
    steps = seen.state.stage.steps
    is_small = bool(rates) and max(rates) * steps < LEAST_MOVE
    return f"the learning rate is {max(rates):.2g}: in {steps} steps no weight changes noticeably" if is_small else ""


def _entropy(seen: _Seen) -> str:
    before, now = _mean_metric(seen.first, "entropy"), _mean_metric(seen.newest, "entropy")
    if before is None or now is None or seen.has_learned or now >= COLLAPSED * before:
        return ""
    return f"the entropy fell from {before:.3g} to {now:.3g}, and the reward did not rise"


def _off_policy(seen: _Seen) -> str:
    ratio, clipped = (_mean_metric(seen.newest, name) for name in ("ratio", "clip_fraction"))
    if ratio is not None and not 1.0 / FAR <= ratio <= FAR:
        return f"the mean ratio of the new to the old policy is {ratio:.3g} in {seen}: it should be near 1"
    is_much = clipped is not None and clipped > MOST
    return f"{clipped:.0%} of the decisions of {seen} are clipped: they hardly count" if is_much else ""


def _overfitted(seen: _Seen) -> str:
    main = seen.state.settings.main
    known = [each for each in seen.state.evaluations if each.is_of_rollouts == main.uses_rollouts and not each.outdated]
    merit = merits(known)
    known = [each for each in known if each.version >= main.first_version and math.isfinite(merit[each.version])]
    known = known[-DECLINES - 1 :]
    if len(known) <= DECLINES or main.source == "preferences":
        return ""
    scores, first, last = [merit[each.version] for each in known], known[0].version, known[-1].version
    # Of demonstrations, the loss of a batch stands for its reward.
    gains = [gain for each, gain in seen.gains if first < each.step <= last]
    before, now = (_mean(part) for part in (gains[: len(gains) // 2], gains[len(gains) // 2 :]))
    # Accuracy has the variance of its mean; losses are of the same decisions each time.
    variance = sum(
        (score * (1.0 - score) if each.accuracy == score else each.spread**2) / max(1, each.num_prompts)
        for each, score in (*zip(known, scores, strict=True),)[:: len(known) - 1]
    )
    is_falling = all(one > two for one, two in itertools.pairwise(scores))
    is_much = scores[0] - scores[-1] > max(FALLEN * abs(scores[0]), ERRORS * math.sqrt(variance))
    if before is None or now is None or now <= before or not (is_falling and is_much):
        return ""
    what, sign = ("score", 1) if main.uses_rollouts else ("loss", -1)
    values = ", then ".join(f"{sign * merit[each.version]:.3g} at step {each.version}" for each in known)
    return f"training gets better and held-out rows worse: their {what} was {values}"


def _mean_metric(records: Iterable[StepRecord], name: str) -> float | None:
    return _mean(each.metrics.get(name) for each in records)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


_Looks = dict[str, tuple[Callable[[_Seen], str], str]]
_OF_PROMPTS: Final[_Looks] = {
    "unscored": (_unscored, "{seen.advice_on_unscored}"),
    "stale": (_stale, "raise sync.max_staleness, or lower rollout.replicas or rollout.max_in_flight"),
    "dropped": (_dropped, "change the rows (dataset), their limits (dataset.max_prompt_units) or the reward"),
    "scores": (
        _scores,
        "make the reward faster, or raise rollout.reward_workers; where scores are late, lower reward.N.timeout_s",
    ),
}
_OF_STEPS: Final[_Looks] = {
    "collapsed": (lambda seen: seen.fall.text if seen.fall else "", "{seen.fall.advice}"),
    "equal": (_equal, "{seen.advice_on_equal}"),
    "truncated": (_truncated, "raise rollout.sampling.max_units, or have the reward ask for shorter answers"),
    "untrained": (_untrained, "lower {seen.lr}, or change policy.precision, reward.N.weight or algorithm.options"),
    "learning-rate": (_learning_rate, f"raise {{seen.lr}}; {USUAL_LR}"),
    "entropy": (_entropy, "lower {seen.lr}, raise rollout.sampling.temperature, or bind to a [reference]"),
    "off-policy": (_off_policy, "lower {seen.lr} or sync.max_staleness, or widen the bounds (algorithm.options)"),
    "overfitted": (_overfitted, "stop earlier (run.steps), take more rows (dataset), or look how the reward is fooled"),
}
_CONSEQUENCES: Final = ("equal", "truncated", "entropy")
"""Left out where the policy collapsed: what they advise would not bring it back."""
