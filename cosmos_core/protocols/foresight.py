"""What planning asks an engine before any process starts (`Provider.foresee`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs

from cosmos_core.protocols.denoising import DecisionKind
from cosmos_core.protocols.engine import Sampling
from cosmos_core.protocols.facts import ModelFacts

if TYPE_CHECKING:
    from cosmos_core.protocols.model import Model


@attrs.frozen(kw_only=True, eq=False)
class EngineOutlook:
    """What is known of an engine's part in a run when that is planned.

    Attributes:
        model: The model plugin's instance.
        facts: Of the model, found without weights.
        device: Where it will generate, as the recipe says.
        has_gpu: Whether this machine, where `auto` may be decided, has a GPU.
        precision: Name of the torch dtype of its weights.
        temperatures: Each temperature at which it will draw, by the recipe's key.
        samplings: How it will draw, by the recipe's table: `rollout.sampling`, and `evaluation` where anything is
            evaluated; empty where that is not known.
        shows_media: Whether prompts show images or videos.
        num_ranks: Processes of a replica.
    """

    model: Model
    facts: ModelFacts
    device: Literal["auto", "cpu", "cuda"]
    has_gpu: bool
    precision: str
    temperatures: Mapping[str, float]
    shows_media: bool
    num_ranks: int = 1
    samplings: Mapping[str, Sampling] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Foresight:
    """What an engine says of that.

    Attributes:
        problems: What it cannot do, wherever it runs: `key: what, value seen; what to do`.
        absent: What it lacks on this machine, and what to do: such a run can be planned, not started.
        decisions: Of latents, which decisions it makes of rollouts; None: it makes tokens, or does not say.
        decisions_key: The key of the recipe that says so.
        most_decisions: Most decisions of one sample to train on; 0: as many as `rollout.sampling.max_units`.
    """

    problems: tuple[str, ...] = ()
    absent: str = ""
    decisions: DecisionKind | None = None
    decisions_key: str = "rollout.engine.plugin"
    most_decisions: int = 0
