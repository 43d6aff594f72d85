"""Records of everything that a recipe selects: capabilities, facts, and what rows are like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from cosmos_core.config.job import Stage
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    EnvironmentCapabilities,
    ModelCapabilities,
    ModelFacts,
    Preflight,
    RewardCapabilities,
    Split,
)
from cosmos_core.protocols.dataset import Omission
from cosmos_core.protocols.frozen import Comparison, FrozenRole
from cosmos_core.protocols.model import Record


@attrs.frozen(kw_only=True)
class Measured:
    """Properties of some rows, spread over the train split.

    Attributes:
        num_rows: Rows looked at.
        num_demonstrations: Those with a demonstration.
        num_preferences: Those with a demonstration and a rejected completion.
        shortest_prompt: Units of the shortest prompt.
        longest_prompt: Units of the longest prompt.
        num_with_media: Those that show images or videos.
        num_heldout: First held-out rows looked at; none where nothing is evaluated.
        num_heldout_demonstrations: Those with a demonstration.
        num_unusable: Of the rows looked at, those that the dataset or the model refuses.
        fault: Why the first of these is refused.
        num_too_long: Those whose prompt does not fit with a completion, or a demonstration; their lengths do count.
        num_vetted: Demonstrations that the model was asked about (`Vetting`) and would take.
        num_unfit: Those that `dataset.min_prompt_units` and `max_prompt_units` leave out; their lengths do not count.
    """

    num_rows: int
    num_demonstrations: int
    shortest_prompt: int
    longest_prompt: int
    num_preferences: int = 0
    num_with_media: int = 0
    num_heldout: int = 0
    num_heldout_demonstrations: int = 0
    num_unusable: int = 0
    fault: str = ""
    num_unfit: int = 0
    num_too_long: int = 0
    num_vetted: int = 0


@attrs.frozen(kw_only=True)
class FrozenFacts:
    """Facts of a frozen model, and how it differs from the policy.

    Attributes:
        facts: Of the model.
        misfit: The first row that it encodes otherwise than the policy; empty if it encodes all that were tried alike.
        plugin: Name of its model plugin.
        capabilities: Of this plugin.
    """

    facts: ModelFacts
    misfit: str
    plugin: str
    capabilities: ModelCapabilities


@attrs.frozen(kw_only=True)
class Parts:
    """The capabilities of everything that a recipe selects.

    Attributes:
        model: Of the model plugin.
        facts: Of the model itself.
        dataset: Of the dataset plugin.
        stages: Each stage with its algorithm's capabilities, in order.
        rewards: Of each reward, in the recipe's order.
        engine: Of the rollout engine; None if no rollout replica runs.
        num_train_rows: Rows of the train split.
        num_heldout_rows: Rows of the held-out split.
        measured: What some of the train rows are like.
        omitted: Rows that the dataset leaves out of each split, by reason.
        records: What the model's options ask the engine to record.
        environment: Of the environment; None where the recipe has none.
        preflight: What the engine says of the run.
        converses: Whether the model goes on after what is not its own.
        consults: Of each stage whose algorithm consults frozen models, by index: which, and by which comparison.
        imitates: Demonstrations for each group, of stages whose algorithm imitates some beside rollouts, by index.
        frozen: What was found of the frozen models.
        unmet: What the algorithms need of models that the recipe does not have.
        absent: What rewards lack on this machine, and what to do: such a run can be planned, not started.
    """

    model: ModelCapabilities
    facts: ModelFacts
    dataset: DatasetCapabilities
    stages: Sequence[tuple[Stage, AlgorithmCapabilities]]
    rewards: Sequence[RewardCapabilities]
    engine: EngineCapabilities | None
    num_train_rows: int
    num_heldout_rows: int
    measured: Measured
    records: Sequence[Record] = ()
    environment: EnvironmentCapabilities | None = None
    omitted: Mapping[Split, tuple[Omission, ...]] = attrs.field(factory=dict)
    preflight: Preflight = Preflight()
    converses: bool = True
    consults: Mapping[int, Mapping[FrozenRole, Comparison | None]] = attrs.field(factory=dict)
    imitates: Mapping[int, int] = attrs.field(factory=dict)
    frozen: Mapping[FrozenRole, FrozenFacts] = attrs.field(factory=dict)
    unmet: Sequence[str] = ()
    absent: Sequence[str] = ()

    @property
    def has_tokens(self) -> bool:
        """True if the model decides tokens; decisions of latents are forwards of their own, in no context."""
        return "tokens" in self.model.payload_kinds
