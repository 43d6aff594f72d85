# ruff: noqa: PLC0414 - every table of the recipe is found here, wherever it is written
"""The recipe: every key, its type, default, bounds and help; tables on training and generation are of `training`.

The reference in the documentation is generated from these classes, so `help` is written for users.
Validators reject, they never rewrite.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config.sources import label
from cosmos_core.config.training import ABOVE_ZERO as ABOVE_ZERO
from cosmos_core.config.training import AT_MOST_A_DAY, NAME
from cosmos_core.config.training import FRACTION as FRACTION
from cosmos_core.config.training import NOT_NEGATIVE as NOT_NEGATIVE
from cosmos_core.config.training import POSITIVE as POSITIVE
from cosmos_core.config.training import AverageConfig as AverageConfig
from cosmos_core.config.training import CriticConfig as CriticConfig
from cosmos_core.config.training import EngineConfig as EngineConfig
from cosmos_core.config.training import Float8Config as Float8Config
from cosmos_core.config.training import LoraConfig as LoraConfig
from cosmos_core.config.training import MeshConfig as MeshConfig
from cosmos_core.config.training import OptimizerConfig as OptimizerConfig
from cosmos_core.config.training import ParallelConfig as ParallelConfig
from cosmos_core.config.training import PolicyConfig as PolicyConfig
from cosmos_core.config.training import RolloutConfig as RolloutConfig
from cosmos_core.config.training import SamplingConfig as SamplingConfig
from cosmos_core.config.training import SyncConfig as SyncConfig
from cosmos_core.config.training import WarmupConfig as WarmupConfig
from cosmos_core.config.training import option as option
from cosmos_core.protocols.frozen import FrozenRole
from cosmos_core.types import JSON


@attrs.frozen(kw_only=True)
class ControlConfig:
    """The controller."""

    bind: str = option("127.0.0.1", help="Address that the controller and the replicas' payload servers listen on.")
    port: int = option(
        0, help="Port of the controller; 0 takes a free one.", validator=check.and_(check.ge(0), check.le(65535))
    )
    keys: str | None = option(
        None, help="Folder of keys (`cosmos keys new`), needed to listen beyond this machine; the run's own if absent."
    )
    page_port: int = option(
        0,
        help="Port of the live web page; 0 takes a free one, -1 serves none.",
        validator=check.and_(check.ge(-1), check.le(65535)),
    )
    page_bind: str = option(
        "127.0.0.1", help="Address that the page listens on; beyond this machine even looking needs the run's token."
    )
    join_timeout_s: float = option(
        1800.0,
        help="Seconds for which the run waits for a replica that it cannot do without, while none of these joins.",
        validator=ABOVE_ZERO,
    )
    heartbeat_s: float = option(1.0, help="Seconds between heartbeats.", validator=ABOVE_ZERO)
    lost_after_s: float = option(15.0, help="Seconds of silence after which a replica is lost.", validator=ABOVE_ZERO)
    progress_timeout_s: float = option(
        300.0,
        help="Seconds after which a replica that has work and makes no progress is given up, though it beats.",
        validator=ABOVE_ZERO,
    )
    durable: bool = option(False, help="Whether a journal commit survives a power cut (slower), not only a crash.")


@attrs.frozen(kw_only=True)
class LaunchConfig:
    """The launcher of processes."""

    launcher: str = option(
        "local", help="Name of a launcher plugin; `local` starts every process on the machine of `cosmos run`."
    )
    threads: int | None = option(
        None,
        help="OpenMP threads of each process. If absent, OMP_NUM_THREADS; without that, one that has a GPU its share "
        "of the machine's cores, but at most 8, and one on a CPU 1.",
        validator=check.optional(POSITIVE),
    )
    options: Mapping[str, JSON] = option(factory=dict, help="The launcher's own options.")
    restarts: int = option(
        3,
        help="Times in ten minutes that a replica, or the controller, is started again after it was killed; 0: never.",
        validator=NOT_NEGATIVE,
    )


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
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", help='Precision of its weights; "auto" is `policy.precision` on a GPU, and "fp32" on a CPU.'
    )

    def held(self, policy: str, *, on_gpu: bool) -> Literal["fp32", "bf16"]:
        """The precision of its weights, where the policy's is `policy`."""
        if self.precision == "auto":
            return "bf16" if on_gpu and policy == "bf16" else "fp32"
        return self.precision


@attrs.frozen(kw_only=True)
class AlgorithmConfig:
    """The training objective."""

    plugin: str = option(help="Name of the algorithm plugin.")
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")


@attrs.frozen(kw_only=True)
class DatasetConfig:
    """The source of prompts."""

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
        """Say why a train prompt of so many units is dropped: a reason to count by, and the detail; empty if not."""
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
    timeout_s: float = option(10.0, help="Seconds until a score counts as timed out.", validator=AT_MOST_A_DAY)
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")

    @property
    def label(self) -> str:
        """The name that it is reported under."""
        return self.name or label(self.plugin)


@attrs.frozen(kw_only=True)
class AgentConfig:
    """Environments that are agents: they call the model at an endpoint of the rollout replica."""

    timeout_s: float = option(
        600.0, help="Seconds until an agent that has not ended counts as timed out.", validator=AT_MOST_A_DAY
    )
    concurrency: int = option(
        256, help="Agents that run at once in one worker process; others wait.", validator=POSITIVE
    )
    memory_gb: float | None = option(
        None,
        help="GB of memory that a worker process may have of its own, and each process that agents start; absent: any.",
        validator=check.optional(ABOVE_ZERO),
    )
    names: tuple[str, ...] = option(
        (), help='Names by which agents may ask for the model besides the run\'s, such as "gpt-4.1"; "*" is any.'
    )
    host: str = option("127.0.0.1", help="Address at which the endpoint listens, and by which agents reach it.")


@attrs.frozen(kw_only=True)
class EnvironmentConfig:
    """The environment that answers the model's turns, or an agent that calls it; without, a completion is one turn."""

    plugin: str = option(help="Name of the environment plugin.")
    weight: float = option(0.0, help="Factor of the environment's own reward in the sum; 0 only reports it.")
    max_turns: int = option(
        8, help="Most turns of the model in one completion; of an agent, most calls of the model.", validator=POSITIVE
    )
    timeout_s: float = option(10.0, help="Seconds until an answer counts as timed out.", validator=AT_MOST_A_DAY)
    workers: int = option(1, help="Processes of one replica in which environments run.", validator=POSITIVE)
    agent: AgentConfig = option(factory=AgentConfig, help="Agents, which call the model themselves.")
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")

    @property
    def label(self) -> str:
        """The name that its own reward is reported under."""
        return label(self.plugin)


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
    max_units: int | None = option(
        None, help="Longest completion; `rollout.sampling.max_units` if absent.", validator=check.optional(POSITIVE)
    )


@attrs.frozen(kw_only=True)
class TrackingConfig:
    """Lifecycle hooks of the run."""

    hooks: tuple[str, ...] = option((), help="Names of hook plugins, such as `mlflow`.")
    options: Mapping[str, Mapping[str, JSON]] = option(factory=dict, help="Options of each hook, by name.")


@attrs.frozen(kw_only=True)
class SamplesConfig:
    """The samples that a run keeps in its folder, for people to read (`cosmos samples`)."""

    keep: str = option(
        "10GB",
        help='Size that samples/ may have, such as "500MB"; beyond it the oldest are removed. "all": any; "none": off.',
    )

    def __attrs_post_init__(self) -> None:
        if not re.fullmatch(r"all|none|[0-9]+(\.[0-9]+)?[KMGT]B", self.keep):
            raise ValueError(
                f'keep is "{self.keep}"; give a size in KB, MB, GB or TB such as "500MB", or "all", or "none"'
            )

    @property
    def max_bytes(self) -> int:
        """The size in bytes; 0 keeps none."""
        if self.keep in ("all", "none"):
            return sys.maxsize if self.keep == "all" else 0
        return int(float(self.keep[:-2]) * 1000 ** (1 + "KMGT".index(self.keep[-2])))


@attrs.frozen(kw_only=True)
class Recipe:
    """A whole run."""

    run: RunConfig = option(help="The run itself.")
    model: ModelConfig = option(help="The model to train.")
    algorithm: AlgorithmConfig = option(help="The training objective.")
    dataset: DatasetConfig = option(help="Where prompts come from.")
    reward: tuple[RewardConfig, ...] = option((), help="The rewards.")
    reference: FrozenConfig | None = option(None, help="The frozen model that the policy is compared with.")
    teacher: FrozenConfig | None = option(None, help="The frozen model that the policy learns from.")
    critic: CriticConfig | None = option(None, help="A head that estimates returns.")
    environment: EnvironmentConfig | None = option(None, help="What answers the model's turns.")
    warmup: WarmupConfig | None = option(None, help="A supervised stage before the main one.")
    policy: PolicyConfig = option(factory=PolicyConfig, help="Policy replicas.")
    rollout: RolloutConfig = option(factory=RolloutConfig, help="Rollout replicas.")
    sync: SyncConfig = option(factory=SyncConfig, help="How the two pools keep pace.")
    evaluation: EvaluationConfig = option(factory=EvaluationConfig, help="Held-out evaluation.")
    samples: SamplesConfig = option(factory=SamplesConfig, help="Samples that are kept.")
    tracking: TrackingConfig = option(factory=TrackingConfig, help="Trackers and other lifecycle hooks.")
    control: ControlConfig = option(factory=ControlConfig, help="The controller.")
    launch: LaunchConfig = option(factory=LaunchConfig, help="How processes are started.")

    @property
    def frozen(self) -> Mapping[FrozenRole, FrozenConfig]:
        """The frozen models, by role."""
        named: dict[FrozenRole, FrozenConfig | None] = {"reference": self.reference, "teacher": self.teacher}
        return {role: config for role, config in named.items() if config is not None}

    @property
    def has_dialogues(self) -> bool:
        """True if a sample may have several turns, each of which is a request for what follows all before it."""
        return self.environment is not None

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The terms of a sample's reward: the rewards, and the environment's own where it counts."""
        names = tuple(reward.label for reward in self.reward)
        if self.environment is None or self.environment.weight == 0.0:
            return names
        return (*names, self.environment.label)
