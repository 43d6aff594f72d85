"""The job: a resolved recipe with the facts that planning found, as every process of a run reads it.

`cosmos run` writes it into the run's folder before any process starts; a process is told the folder only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import attrs

from cosmos_core.config.dynamic import DynamicKey
from cosmos_core.config.schema import OptimizerConfig, Recipe
from cosmos_core.config.sources import label
from cosmos_core.protocols.algorithm import Source
from cosmos_core.protocols.dataset import Omission, Split, Window
from cosmos_core.types import JSON

Unit: TypeAlias = Literal["token", "denoising step"]
"""What a sample is made of, and is counted in."""


def are_right_or_wrong(scores: Iterable[float], unit: Unit) -> bool:
    """True if the mean of scores is an accuracy: of text, each of them 0 or 1."""
    return unit == "token" and set(scores) <= {0.0, 1.0}


@attrs.frozen(kw_only=True)
class StageFacts:
    """Facts of a stage's algorithm for the controller, which imports no plugin.

    Attributes:
        source: Where its batches come from (`AlgorithmCapabilities.source`).
        min_group_size: Fewest scored samples of a prompt that it can train on (`AlgorithmCapabilities.min_group_size`).
        windows: Its first prompts, where the dataset's rows become available little by little (`windows`).
    """

    source: Source
    min_group_size: int = 1
    dynamic: tuple[DynamicKey, ...] = ()
    windows: tuple[Window, ...] = ()


@attrs.frozen(kw_only=True)
class Job:
    """One run.

    Attributes:
        run_id: Unique id; a resumed run keeps it.
        directory: The run's folder (`<output_dir>/<name>`).
        recipe_directory: Folder of the recipe file; relative paths of datasets start there.
        num_evaluation_prompts: Held-out prompts of one evaluation (0: no evaluation).
        num_measured_prompts: Of these, from the first on, those of whose demonstrations the loss is measured (0: none).
        stages: Facts of each stage, in order: the warm-up's first, if the recipe has one.
        fixed: Keys of the recipe that declare themselves dynamic and cannot change in this run, and why.
        unit: What samples are made of, by the kind of payload that the model takes.
        given_frames: Fewest frames of images or videos that a row gives a world model (0: some give none).
        omitted: Rows that the dataset leaves out of each split, by reason.
        is_plain: Whether the first row is plain text that the model goes on from: no chat, and no environment answers.
        row_digests: Digests of the first rows of each dataset function, which every process has to get.
    """

    run_id: str
    directory: Path
    recipe_directory: Path
    recipe: Recipe
    num_train_rows: int = 0
    num_heldout_rows: int = 0
    num_evaluation_prompts: int = 0
    uses_rollouts: bool = False
    stages: tuple[StageFacts, ...] = ()
    num_measured_prompts: int = attrs.field()
    fixed: Mapping[str, str] = attrs.field(factory=dict)
    unit: Unit = "token"
    given_frames: int = 0
    omitted: Mapping[Split, tuple[Omission, ...]] = attrs.field(factory=dict)
    is_plain: bool = False
    row_digests: tuple[str, ...] = ()

    @num_measured_prompts.default
    def _before_it_was_written(self) -> int:
        """The number in releases whose jobs do not say: all, where nothing generates."""
        return 0 if self.uses_rollouts else self.num_evaluation_prompts

    @property
    def takes_turns(self) -> bool:
        """True if policy and rollout replicas share GPUs, in turns."""
        return self.uses_rollouts and self.recipe.rollout.placement == "colocated"

    @property
    def assets(self) -> Path:
        """Folder of what planning made locally (config, tokenizer)."""
        return self.directory / "assets"

    @property
    def journal(self) -> Path:
        """The controller's journal."""
        return self.directory / "journal.sqlite"

    @property
    def recovery_snapshots(self) -> Path:
        """The folder in which the controller keeps what a new journal could go on from."""
        return self.directory / "recovery"

    @property
    def keys(self) -> Path:
        """Folder of the keys with which its processes speak to one another."""
        named = self.recipe.control.keys
        return self.directory / "keys" if named is None else self.recipe_directory / Path(named).expanduser()

    @property
    def logs(self) -> Path:
        """Folder of each process's log, `<replica>.jsonl`."""
        return self.directory / "logs"

    @property
    def checkpoints(self) -> str:
        """fsspec URL or path of the folder of checkpoints."""
        return self.recipe.policy.checkpoint.url or str(self.directory / "checkpoints")


@attrs.frozen(kw_only=True)
class Stage:
    """One algorithm with its optimizer, for some steps.

    Attributes:
        index: Place in the run, from 0.
        key: Table of the recipe that describes it, `warmup` or `algorithm`.
        plugin: Name of the algorithm plugin.
        prompts_per_step: Prompts (or demonstrations) of one step, over all policy replicas.
        first_step: Global steps before this stage; its own are `first_step + 1` to `last_step`.
    """

    index: int
    key: str
    plugin: str
    options: Mapping[str, JSON]
    steps: int
    prompts_per_step: int
    optimizer: OptimizerConfig
    first_step: int

    @property
    def label(self) -> str:
        """The name of its algorithm, for people."""
        return label(self.plugin)

    @property
    def last_step(self) -> int:
        """The global step with which the stage ends."""
        return self.first_step + self.steps


def stages(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages of a recipe, in order."""
    warmup = recipe.warmup
    main = Stage(
        index=0 if warmup is None else 1,
        key="algorithm",
        plugin=recipe.algorithm.plugin,
        options=recipe.algorithm.options,
        steps=recipe.run.steps,
        prompts_per_step=recipe.policy.prompts_per_step,
        optimizer=recipe.policy.optimizer,
        first_step=0 if warmup is None else warmup.steps,
    )
    if warmup is None:
        return (main,)
    first = Stage(
        index=0,
        key="warmup",
        plugin=warmup.plugin,
        options=warmup.options,
        steps=warmup.steps,
        prompts_per_step=warmup.prompts_per_step,
        optimizer=warmup.optimizer,
        first_step=0,
    )
    return (first, main)
