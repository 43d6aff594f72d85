"""The recipe: every key, its type, default, bounds and help.

The reference in the documentation is generated from these classes, so `help` is written for users.
Validators reject, they never rewrite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import validators as check

from cosmos_core.protocols.quantization import Quantization
from cosmos_core.types import JSON


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,  # noqa: A002 - the users' word for it
    validator: Any = None,
    factory: Any = None,
    dynamic: Any = False,
) -> Any:
    """An attrs field of a recipe, or of a plugin's options.

    Args:
        default: What it is where a recipe does not say.
        help: What it is for, for users.
        validator: What it must be.
        factory: Makes the default, in place of it.
        dynamic: Whether it may change while a run goes on (`cosmos set`): a truth value, a number or a string, absent
            or not, whose validators are of `ge`, `gt`, `le`, `lt`, `in_`, `optional` and `and_`. A validator says what
            it must be then, besides. Of plugins, options of algorithms may be.
    """
    metadata = {"help": help, "dynamic": dynamic}
    if factory is not None:
        return attrs.field(factory=factory, validator=validator, metadata=metadata)
    return attrs.field(default=default, validator=validator, metadata=metadata)


POSITIVE = check.ge(1)
NOT_NEGATIVE = check.ge(0)
ABOVE_ZERO = check.gt(0.0)
FRACTION = check.and_(check.ge(0.0), check.le(1.0))
LEAST_TEMPERATURE = 0.01
"""A run goes on with at least this: below it, not every engine draws at the temperature that it is asked for."""
NAME = check.matches_re(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
    path: str | None = option(None, help="Folder or hub name of a Hugging Face checkpoint.")
    config: Mapping[str, JSON] | None = option(
        None, help="A Hugging Face config, for a model from random weights; give this or `path`."
    )
    tokenizer: TokenizerConfig | None = option(None, help="Make a tokenizer from the dataset instead of loading one.")
    trust_remote_code: bool = option(False, help="Whether code inside the checkpoint may run.")
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")


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


@attrs.frozen(kw_only=True)
class RewardConfig:
    """One reward; several are summed by weight and reported apart."""

    plugin: str = option(help="Name of the reward plugin.")
    weight: float = option(1.0, help="Factor in the sum.")
    timeout_s: float = option(10.0, help="Seconds until a score counts as timed out.", validator=ABOVE_ZERO)
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")


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
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = option(1e-6, help="Peak learning rate.", validator=NOT_NEGATIVE, dynamic=True)
    betas: tuple[float, float] = option((0.9, 0.95), help="AdamW's decay rates.")
    eps: float = option(1e-8, help="AdamW's epsilon.", validator=ABOVE_ZERO)
    weight_decay: float = option(0.0, help="Decoupled weight decay.", validator=NOT_NEGATIVE, dynamic=True)
    clip_norm: float = option(
        1.0, help="Largest global gradient norm; 0 does not clip.", validator=NOT_NEGATIVE, dynamic=True
    )
    schedule: Literal["constant", "linear", "cosine"] = option("constant", help="Shape after the warm-up steps.")
    warmup_steps: int = option(0, help="Steps of linear rise from 0 to `lr`.", validator=NOT_NEGATIVE)
    final_lr_ratio: float = option(0.1, help="Last learning rate over the peak (linear, cosine).", validator=FRACTION)


@attrs.frozen(kw_only=True)
class WarmupConfig:
    """A supervised stage before the main one: same model, its own objective and optimizer."""

    plugin: str = option(help="Name of the algorithm plugin; it must learn from demonstrations.")
    steps: int = option(help="Training steps of the warm-up.", validator=POSITIVE)
    prompts_per_step: int = option(16, help="Demonstrations of one step, over all policy replicas.", validator=POSITIVE)
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")
    optimizer: OptimizerConfig = option(factory=OptimizerConfig, help="The warm-up's optimizer.")


@attrs.frozen(kw_only=True)
class MeshConfig:
    """Sizes of the axes of a replica's device mesh; `pp · dp_replicate · dp_shard · cp · tp` processes."""

    dp_replicate: int = option(1, help="Replicated data parallel.", validator=POSITIVE)
    dp_shard: int = option(1, help="Sharded data parallel (FSDP).", validator=POSITIVE)
    tp: int = option(1, help="Tensor parallel, with sequence parallel.", validator=POSITIVE)
    cp: int = option(1, help="Context parallel.", validator=POSITIVE)
    pp: int = option(1, help="Pipeline parallel.", validator=POSITIVE)
    ep: int = option(1, help="Expert parallel, over the processes of `tp`, `cp` and `dp_shard`.", validator=POSITIVE)


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """How a policy replica uses its mesh, and what it trades for memory."""

    sequence_parallel: bool = option(True, help="Split activations between blocks over `tp`.")
    context: Literal["auto", "ulysses", "gather", "ring"] = option(
        "auto",
        help="Attention over `cp`: `ulysses` exchanges heads, `gather` collects keys and values, `ring` passes them "
        "on; `auto` takes `ulysses` where `cp` divides the heads, else `gather`.",
    )
    schedule: Literal["1f1b", "interleaved", "zero-bubble"] = option(
        "1f1b", help="Order of micro-batches in the pipeline; the last two keep two stages on each process."
    )
    recompute: Literal["none", "selective", "full"] = option(
        "none",
        help="Activations to recompute in the backward pass: all of a layer (`full`), or all but its matrix products "
        "and attention (`selective`).",
    )
    reshard_after_forward: Literal["auto", "always", "never"] = option(
        "auto",
        help="Whether FSDP frees a layer's gathered weights before its backward pass; `auto` does unless `pp` > 1.",
    )
    cpu_offload: bool = option(False, help="Keep weights, gradients and optimizer of an accelerator in CPU memory.")
    compile: Literal["auto", "on", "off"] = option("auto", help="Compile each layer; `auto` does on CUDA.")


@attrs.frozen(kw_only=True)
class Float8Config:
    """8-bit matrix products in training (float8 e4m3 forward, scaled as they are made)."""

    scaling: Literal["none", "tensorwise", "rowwise"] = option(
        "none", help="One scale a tensor, or one a row; `none` keeps the compute precision."
    )
    skip: tuple[str, ...] = option(("lm_head",), help="Parts of names of linear layers that stay as they are.")


@attrs.frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685): the weights stay, two small matrices beside each linear layer learn."""

    rank: int = option(16, help="Rank of the adapters.", validator=POSITIVE)
    alpha: float = option(32.0, help="Their scale is alpha / rank.", validator=ABOVE_ZERO)
    modules: tuple[str, ...] = option(
        ("all-linear",), help="Last parts of names of the linear layers to adapt; `all-linear` is all but the output."
    )


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    interval: int = option(
        200,
        help="Steps between checkpoints; 0 saves only at the end and on Ctrl-C.",
        validator=NOT_NEGATIVE,
        dynamic=True,
    )
    keep: int = option(
        2, help="Newest checkpoints to keep; the best one by evaluation is kept besides.", validator=POSITIVE
    )
    url: str | None = option(None, help="fsspec URL of the folder for checkpoints; the run's folder if absent.")


@attrs.frozen(kw_only=True)
class PolicyConfig:
    """Policy replicas: they train."""

    replicas: int = option(
        1, help="Number of policy replicas; each step's batch is shared among them.", validator=POSITIVE
    )
    prompts_per_step: int = option(16, help="Prompts of one step, over all policy replicas.", validator=POSITIVE)
    micro_batch_units: int = option(
        8192, help="Units (tokens, prompt included) of one forward, at most.", validator=POSITIVE
    )
    precision: Literal["fp32", "bf16"] = option("bf16", help="Compute precision; weights and optimizer stay fp32.")
    max_nonfinite_steps: int = option(
        3, help="Consecutive steps with a non-finite gradient to skip before failing.", validator=NOT_NEGATIVE
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="Where to train.")
    mesh: MeshConfig = option(factory=MeshConfig, help="The replica's device mesh.")
    parallel: ParallelConfig = option(factory=ParallelConfig, help="How the mesh is used.")
    float8: Float8Config = option(factory=Float8Config, help="8-bit matrix products.")
    lora: LoraConfig | None = option(None, help="Train low-rank adapters instead of the weights.")
    optimizer: OptimizerConfig = option(factory=OptimizerConfig, help="The optimizer.")
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, help="Checkpoints.")


@attrs.frozen(kw_only=True)
class SamplingConfig:
    """How training completions are drawn."""

    temperature: float = option(
        1.0, help="Softmax temperature.", validator=ABOVE_ZERO, dynamic=check.ge(LEAST_TEMPERATURE)
    )
    top_p: float = option(
        1.0, help="Nucleus mass; 1 takes the whole vocabulary.", validator=check.and_(check.gt(0.0), check.le(1.0))
    )
    top_k: int = option(0, help="Most likely tokens to draw from; 0 takes all.", validator=NOT_NEGATIVE)
    max_units: int = option(
        256, help="Longest completion; of a dialogue, units of the model's own turns together.", validator=POSITIVE
    )


@attrs.frozen(kw_only=True)
class EngineConfig:
    """The rollout engine."""

    plugin: str = option("embedded", help="Name of the engine plugin.")
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """Rollout replicas: they generate and score."""

    replicas: int = option(1, help="Number of rollout replicas.", validator=POSITIVE)
    group_size: int = option(8, help="Completions of each prompt.", validator=POSITIVE)
    max_in_flight: int = option(64, help="Sequences that one replica decodes at once.", validator=POSITIVE)
    precision: Literal["fp32", "bf16"] = option("bf16", help="Precision of the engine's weights and compute.")
    quantization: Quantization = option(
        "none",
        help="Format of the matrices of the decoder's layers: fp8, mxfp8, mxfp4 or nvfp4; they are sent in it, too.",
    )
    reward_workers: int = option(1, help="Processes of one replica that score completions.", validator=POSITIVE)
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="Where to generate.")
    mesh: MeshConfig = option(factory=MeshConfig, help="The replica's device mesh.")
    engine: EngineConfig = option(factory=EngineConfig, help="The engine.")
    sampling: SamplingConfig = option(factory=SamplingConfig, help="Sampling of training completions.")


@attrs.frozen(kw_only=True)
class SyncConfig:
    """How the two pools keep pace."""

    mode: Literal["async", "sync"] = option("async", help="`sync` generates each batch with the weights it trains.")
    max_staleness: int = option(
        2,
        help="Most steps that a sample's oldest weights may lag the weights it trains; sync mode lags none.",
        validator=NOT_NEGATIVE,
        dynamic=True,
    )
    interval: int = option(1, help="Steps between weight publications.", validator=POSITIVE, dynamic=True)
    transport: Literal["auto", "shared-memory", "zmq", "gloo", "nccl", "disk"] = option(
        "auto",
        help="How weights travel; `auto` uses shared memory on one host, else ZeroMQ, and falls back to `directory`.",
    )
    directory: str | None = option(
        None, help="Path or fsspec URL (`s3://bucket/prefix`) where versions are stored, for `auto` or `disk`."
    )
    fan_out: int = option(
        8,
        help="Most rollout replicas that read weights from the policy, or from a replica that passes them on.",
        validator=POSITIVE,
    )
    relay_timeout_s: float = option(
        30.0,
        help="Seconds for each replica above it that one waits for weights, before it reads from the policy.",
        validator=ABOVE_ZERO,
    )
    delta: bool = option(
        False,
        help="Over ZeroMQ, send only values that changed; rollout replicas keep a copy of the weights in host memory.",
    )
    cache: Literal["keep", "recompute"] = option(
        "keep", help="What becomes of the KV cache of sequences in flight at an update."
    )


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


@attrs.frozen(kw_only=True)
class ControlConfig:
    """The controller."""

    bind: str = option("127.0.0.1", help="Address that the controller and the replicas' payload servers listen on.")
    port: int = option(
        0, help="Port of the controller; 0 takes a free one.", validator=check.and_(check.ge(0), check.le(65535))
    )
    keys: str | None = option(
        None,
        help="Folder of keys (`cosmos keys new`), needed to listen beyond this machine; the run's own if absent.",
    )
    page_port: int = option(
        0,
        help="Port of the live web page; 0 takes a free one, -1 serves none.",
        validator=check.and_(check.ge(-1), check.le(65535)),
    )
    page_bind: str = option(
        "127.0.0.1",
        help="Address that the page listens on; beyond this machine even looking needs the run's token.",
    )
    join_timeout_s: float = option(
        120.0, help="Seconds within which the replicas of the recipe must have joined.", validator=ABOVE_ZERO
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
    """How processes are started."""

    launcher: str = option(
        "local", help="Name of a launcher plugin; `local` starts every process on the machine of `cosmos run`."
    )
    threads: int = option(1, help="OpenMP threads of each process on a CPU.", validator=POSITIVE)
    options: Mapping[str, JSON] = option(factory=dict, help="The launcher's own options.")
    restarts: int = option(
        3,
        help="Times in ten minutes that a replica, or the controller, is started again after it was killed; 0: never.",
        validator=NOT_NEGATIVE,
    )


@attrs.frozen(kw_only=True)
class Recipe:
    """A whole run."""

    run: RunConfig = option(help="The run itself.")
    model: ModelConfig = option(help="The model to train.")
    algorithm: AlgorithmConfig = option(help="The training objective.")
    dataset: DatasetConfig = option(help="Where prompts come from.")
    reward: tuple[RewardConfig, ...] = option((), help="The rewards.")
    environment: EnvironmentConfig | None = option(None, help="What answers the model's turns.")
    warmup: WarmupConfig | None = option(None, help="A supervised stage before the main one.")
    policy: PolicyConfig = option(factory=PolicyConfig, help="Policy replicas.")
    rollout: RolloutConfig = option(factory=RolloutConfig, help="Rollout replicas.")
    sync: SyncConfig = option(factory=SyncConfig, help="How the two pools keep pace.")
    evaluation: EvaluationConfig = option(factory=EvaluationConfig, help="Held-out evaluation.")
    tracking: TrackingConfig = option(factory=TrackingConfig, help="Trackers and other lifecycle hooks.")
    control: ControlConfig = option(factory=ControlConfig, help="The controller.")
    launch: LaunchConfig = option(factory=LaunchConfig, help="How processes are started.")

    @property
    def reward_names(self) -> tuple[str, ...]:
        """What a sample's reward is the weighted sum of: the rewards, and the environment's own where it counts."""
        names = tuple(reward.plugin for reward in self.reward)
        if self.environment is None or self.environment.weight == 0.0:
            return names
        return (*names, self.environment.plugin)
