"""The kit for environments."""

from __future__ import annotations

from cosmos_core.testing.conformance.environment.answers import EnvironmentAnswers


class EnvironmentConformance(EnvironmentAnswers):
    """What every environment must satisfy: an answer to whatever a model writes, in time, in the workers of a run.

    Set `plugin`, and what else the defaults do not do for.

    Attributes:
        timeout_s: Seconds that an answer may take; the recipe's default.
        turns: Turns of the model that mean something to the environment, such as a call of a tool.
        examples: Dialogues: a row, the model's turns, and the observations that they must get, None where none comes.

    Fixtures to override: `options`, the options to test with; `scripts`, ordinary dialogues that must all go their
    way. The default ones have each of `turns`, and garbled ones of every kind, three times over.
    """
