"""What a run is of: its name and length, model, objective, data, rewards, environment, evaluation, trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config.schema.fields import ABOVE_ZERO, NAME, NOT_NEGATIVE, POSITIVE, option
from cosmos_core.types import JSON


@attrs.frozen(kw_only=True)
class RunConfig:
    """The run itself."""

    name: str = option(help="Name of the run and of its folder.", validator=NAME)
    output_dir: str = option("runs", help="Folder in which the run's folder is made.")
    seed: int = option(0, help="Seed of everything random.", validator=NOT_NEGATIVE)
    steps: int = option(help="Training steps of the algorithm, the warm-up not counted.", validator=POSITIVE)


@attrs.frozen(kw_only=True)
class TokenizerConfig:
    """A tokenizer made locally, for models from random weights."""

    build: Literal["byte-bpe"] = option("byte-bpe", help="What to make: a byte-level BPE trained on the dataset.")
    vocab_size: int = option(512, help="Most entries of the vocabulary.", validator=check.ge(260))
    split_digits: bool = option(True, help="Whether each digit is a token of its own.")
    corpus_rows: int = option(2000, help="Rows of the train split to train it on.", validator=POSITIVE)
    if_missing: bool = option(
        False, help="Make it only where `model.path` is a folder without a tokenizer, such as a config alone."
    )


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The model to train."""

    plugin: str = option("hf", help="Name of the model plugin.")
    path: str | None = option(None, help="Folder, hub name or URL (`s3://bucket/model`) of a Hugging Face checkpoint.")
    config: Mapping[str, JSON] | None = option(
        None, help="A Hugging Face config, for a model from random weights; give this or `path`."
    )
    tokenizer: TokenizerConfig | None = option(None, help="Make a tokenizer from the dataset instead of loading one.")
    trust_remote_code: bool = option(False, help="Whether code inside the checkpoint may run.")
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")


@attrs.frozen(kw_only=True)
class FrozenConfig:
    """A model that the algorithm consults and that is never trained. It runs in the policy's processes."""

    plugin: str | None = option(None, help="Name of its model plugin; the policy's if absent.")
    path: str | None = option(
        None,
        help="Folder or hub name of its checkpoint; a reference without one has the weights its stage starts from.",
    )
    options: Mapping[str, JSON] = option(factory=dict, help="Its plugin's own options; the policy's if none are given.")
    placement: Literal["resident", "offloaded"] = option(
        "offloaded", help="Whether its weights stay on the device, or wait in the machine's memory between uses."
    )


@attrs.frozen(kw_only=True)
class AlgorithmConfig:
    """The training objective."""

    plugin: str = option(help="Name of the algorithm plugin.")
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")


@attrs.frozen(kw_only=True)
class DatasetConfig:
    """Where prompts come from."""

    plugin: str = option(help="Name of the dataset plugin.")
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")
    min_prompt_units: int | None = option(
        None,
        help="Drop, and count, prompts of fewer units (tokens) than this; held-out ones stay.",
        validator=check.optional(POSITIVE),
    )
    max_prompt_units: int | None = option(
        None,
        help="Drop, and count, prompts of more units (tokens) than this; held-out ones stay.",
        validator=check.optional(POSITIVE),
    )

    def __attrs_post_init__(self) -> None:
        least, most = self.min_prompt_units, self.max_prompt_units
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_prompt_units is {least}, more than max_prompt_units, {most}")

    def unfit(self, num_units: int) -> tuple[str, str]:
        """Why a train prompt of so many units is dropped: a reason to count by, and the detail; empty if it stays."""
        least, most = self.min_prompt_units, self.max_prompt_units
        if least is not None and num_units < least:
            return "prompt_too_short", f"a prompt of {num_units} is below dataset.min_prompt_units of {least}"
        if most is not None and num_units > most:
            return "prompt_too_long", f"a prompt of {num_units} is above dataset.max_prompt_units of {most}"
        return "", ""


@attrs.frozen(kw_only=True)
class RewardConfig:
    """One reward; several are summed by weight and reported apart."""

    plugin: str = option(help="Name of the reward plugin.")
    name: str | None = option(
        None, help="What it is reported as, the plugin's name if absent.", validator=check.optional(NAME)
    )
    weight: float = option(1.0, help="Factor in the sum.")
    gate: float | None = option(
        None, help="Where its value is below this, rewards without a gate do not count for the sample; absent: they do."
    )
    timeout_s: float = option(10.0, help="Seconds until a score counts as timed out.", validator=ABOVE_ZERO)
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")

    @property
    def label(self) -> str:
        """What it is reported as."""
        return self.name or self.plugin


@attrs.frozen(kw_only=True)
class EnvironmentConfig:
    """What answers the model's turns; without it, a completion is one turn."""

    plugin: str = option(help="Name of the environment plugin.")
    weight: float = option(0.0, help="Factor of the environment's own reward in the sum; 0 only reports it.")
    max_turns: int = option(8, help="Most turns of the model in one completion.", validator=POSITIVE)
    timeout_s: float = option(10.0, help="Seconds until an answer counts as timed out.", validator=ABOVE_ZERO)
    workers: int = option(1, help="Processes of one replica in which environments run.", validator=POSITIVE)
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")


@attrs.frozen(kw_only=True)
class EvaluationConfig:
    """Greedy completions of held-out prompts, scored by the same rewards; without rewards, the held-out loss."""

    interval: int = option(
        0,
        help="Steps between evaluations; 0 evaluates only before and after training.",
        validator=NOT_NEGATIVE,
        dynamic=True,
    )
    prompts: int = option(
        256,
        help="Held-out prompts, or demonstrations, of one evaluation, the first of the split; 0 never evaluates.",
        validator=NOT_NEGATIVE,
    )
    max_units: int | None = option(None, help="Longest completion; `rollout.sampling.max_units` if absent.")


@attrs.frozen(kw_only=True)
class TrackingConfig:
    """Lifecycle hooks of the run."""

    hooks: tuple[str, ...] = option((), help="Names of hook plugins, such as `mlflow`.")
    options: Mapping[str, Mapping[str, JSON]] = option(factory=dict, help="Options of each hook, by name.")
