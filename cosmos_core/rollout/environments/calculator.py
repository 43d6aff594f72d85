"""The environment `calculator`: the model writes an expression, and is told its value.

A turn whose last line is `calc: 12*(3+4)=` is answered with `84`; any other turn is the model's answer, and the last.
"""

from __future__ import annotations

import attrs

from cosmos_core.config import option
from cosmos_core.protocols import Environment, EnvironmentCapabilities, EnvironmentContext, Provider, Turn, hookimpl
from cosmos_core.rollout.environments.expressions import ExpressionError, evaluate, shown
from cosmos_core.types import Prompt


@attrs.frozen(kw_only=True)
class CalculatorOptions:
    """How the model asks."""

    prefix: str = option(
        "calc:", help="What a line that asks for a value begins with.", validator=attrs.validators.min_len(1)
    )


class Calculator:
    """Answers expressions. Its own reward counts those that it could answer."""

    def __init__(self, options: CalculatorOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        self._prefix = options.prefix

    async def reset(self, prompt: Prompt, seed: int) -> str | None:  # noqa: ARG002 - the prompt says it all
        """The prompt says it all."""
        return None

    async def step(self, text: str) -> Turn:
        """The value of the expression in the last line; a turn without one ends the dialogue."""
        lines = text.rstrip().splitlines()
        asked = lines[-1].strip() if lines else ""
        if not asked.startswith(self._prefix):
            return Turn(done=True)
        expression = asked.removeprefix(self._prefix).strip().removesuffix("=")
        try:
            value = shown(evaluate(expression))
        except ExpressionError as error:
            return Turn(observation=f"error: {error}\n", role="tool", detail=f"{expression:.40} is wrong")
        return Turn(observation=f"{value}\n", role="tool", reward=1.0, detail=f"{expression:.40}={value:.40}")

    async def close(self) -> None:
        """There is nothing to let go of."""


@hookimpl
def cosmos_environment() -> Provider[Environment]:
    """The provider hook."""
    return Provider(
        create=Calculator,
        options=CalculatorOptions,
        capabilities=EnvironmentCapabilities(rewards=True, deterministic=True),
    )
