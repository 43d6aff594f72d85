"""What goes wrong in a simulated run, and how often."""

from __future__ import annotations

import random
from typing import Final, Self

import attrs

from cosmos_core.config.problems import suggestion
from cosmos_core.errors import ConfigError


@attrs.frozen(kw_only=True)
class Faults:
    """Chances are of each message or commit; rates are of a simulated second, and of each replica where they are its.

    Attributes:
        loss: Chance that a message is lost.
        repeat: Chance that it arrives twice.
        delay_s: Longest time that one in three messages takes, so that those behind overtake it.
        crash: Rate of replicas that are killed; they start again as other processes, some of them at once.
        freeze: Rate of replicas that stand still, and later go on as if nothing had been.
        hang: Rate of replicas that go on beating and do nothing any more, ever.
        cut: Rate of links between one replica and the controller that carry nothing for a while.
        slow: Chance that a process takes ten times as long for all that it does.
        broken_group: Chance that a policy replica fails to join a gradient group, or in a step.
        stutter: Chance that a replica says again what it reported earlier, as news.
        wreck: Chance of a policy replica that, when it is about to be sent the newest weights or to leave, it is cut
            off for a while and all others are killed.
        corrupt: Chance that weights which a replica says it has loaded are others than those published.
        controller_crash: Rate of kills of the controller between its turns.
        commit_crash: Chance that it is killed in a commit: before it is durable, after, or while it tells.
        slow_commit: Chance that a commit takes up to `slow_s`.
        slow_s: How long a slow commit takes at most.
        commit_failure: Chance that a commit fails: written or not, the controller cannot know.
        disk_full: Rate of moments from which on nothing can be written until somebody makes room.
        people: Rate of what people do: stop the run, start a replica, set a dynamic key, drain a replica, which may
            well be cut off soon after.
        outage: Rate of moments in which every process ends; the run is resumed from its newest checkpoint, if it has
            one. One that was stopped is resumed half of the time where this is not 0.
        gone: Chance that a replica that was killed never comes back, where another one of its role is there.
        journal_loss: Chance that the journal is lost with that, so that the run is recovered from a snapshot.
        stuck: Rate of policy replicas that wait in a collective that never ends, until another group is formed.
        power_cut: Chance that a kill of the controller between its turns is a power cut, which takes the end of the
            journal, as far as it was not settled.
        sets: Rate of changes of dynamic keys, beside those of `people`; of the bound on staleness where finished
            prompts are about to break the new one.
        until_s: When all of this ends; the run must end after it.
    """

    loss: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.1
    crash: float = 0.0
    freeze: float = 0.0
    hang: float = 0.0
    cut: float = 0.0
    slow: float = 0.0
    broken_group: float = 0.0
    stutter: float = 0.0
    wreck: float = 0.0
    corrupt: float = 0.0
    controller_crash: float = 0.0
    commit_crash: float = 0.0
    slow_commit: float = 0.0
    slow_s: float = 1.0
    commit_failure: float = 0.0
    disk_full: float = 0.0
    people: float = 0.0
    gone: float = 0.0
    outage: float = 0.0
    journal_loss: float = 0.0
    stuck: float = 0.0
    sets: float = 0.0
    power_cut: float = 0.0
    until_s: float = 20.0

    @classmethod
    def drawn(cls, seed: int) -> Self:
        """Some of all faults, others in each seed: some bugs show where two meet, others where one is alone."""
        rng = random.Random(f"faults of {seed}")
        return cls(**{name: rng.choice(choices) for name, choices in _CHOICES.items()})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of `name=number,…`; what is not named does not happen.

        Raises:
            ConfigError: No such fault, or no such number.
        """
        chosen: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, number = part.partition("=")
            if name not in _NAMES:
                raise ConfigError(f"--faults: unknown fault {name!r}; {suggestion(name, _NAMES)}")
            try:
                chosen[name] = float(number)
            except ValueError:
                raise ConfigError(f"--faults: {name} is {number!r}; it must be a number, as in {name}=0.1") from None
            if chosen[name] < 0:
                raise ConfigError(f"--faults: {name} is {number}; it must not be negative")
        return cls(**chosen)

    def __str__(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{name}={value:g}" for name, value in attrs.asdict(self).items() if value)


_NAMES: Final = tuple(field.name for field in attrs.fields(Faults))

_CHOICES: Final[dict[str, tuple[float, ...]]] = {
    "loss": (0.0, 0.05, 0.15),
    "repeat": (0.0, 0.05, 0.2),
    "delay_s": (0.1, 0.5, 1.5),
    "crash": (0.0, 0.05, 0.2),
    "freeze": (0.0, 0.0, 0.03),
    "hang": (0.0, 0.0, 0.03),
    "cut": (0.0, 0.0, 0.03),
    "slow": (0.0, 0.0, 0.3),
    "broken_group": (0.0, 0.0, 0.05, 0.1),
    "stutter": (0.0, 0.05, 0.2),
    "wreck": (0.0, 0.3, 0.6),
    "corrupt": (0.0, 0.0, 0.05),
    "controller_crash": (0.0, 0.0, 0.05, 0.2),
    "commit_crash": (0.0, 0.0, 0.01),
    "slow_commit": (0.0, 0.0, 0.05),
    "slow_s": (0.3, 2.0),
    "commit_failure": (0.0, 0.0, 0.01),
    "disk_full": (0.0, 0.0, 0.05),
    "people": (0.0, 0.0, 0.3, 1.0),
    "outage": (0.0, 0.05, 0.2),
    "journal_loss": (0.0, 0.5, 0.8),
    "until_s": (15.0, 30.0),
    "gone": (0.0, 0.0, 0.3),
    "stuck": (0.0, 0.0, 0.15),
    "sets": (0.0, 0.0, 1.0),
    "power_cut": (0.0, 0.0, 0.5),
}
