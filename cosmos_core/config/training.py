"""Tables of the recipe on training and generation: optimizer, mesh, checkpoints, engine, sampling, sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import validators as check

from cosmos_core.protocols.quantization import Quantization
from cosmos_core.types import JSON

POSITIVE = check.ge(1)
NOT_NEGATIVE = check.ge(0)
ABOVE_ZERO = check.gt(0.0)
AT_MOST_A_DAY = check.and_(ABOVE_ZERO, check.le(86_400.0))
FRACTION = check.and_(check.ge(0.0), check.le(1.0))
LEAST_TEMPERATURE = 0.01
"""A run goes on with at least this: below it, not every engine draws at the temperature that it is asked for."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""torch dtype names of precisions."""
USUAL_LR = "usual: 1e-6 for RL of a pretrained model, 1e-5 to 2e-5 for SFT, 1e-4 with LoRA, 1e-3 for a tiny model"
NAME = check.matches_re(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,  # noqa: A002 - the users' word for it
    validator: Any = None,
    factory: Any = None,
    dynamic: Any = False,
    required: bool = False,
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
        required: Whether a recipe must say, although code need not: the default is then for objects made in code.
    """
    metadata = {"help": help, "dynamic": dynamic, "required": required}
    if factory is not None:
        return attrs.field(factory=factory, validator=validator, metadata=metadata)
    return attrs.field(default=default, validator=validator, metadata=metadata)


@attrs.frozen(kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule."""

    lr: float = option(1e-6, help=f"Peak learning rate; {USUAL_LR}.", validator=ABOVE_ZERO, dynamic=True, required=True)
    kind: Literal["adamw", "adamw-8bit", "muon"] = option(
        "adamw",
        help="`adamw-8bit` keeps moments in 8 bits (torchao); `muon` (arXiv:2502.16982) orthogonalises the updates of "
        "layers' matrices, and all else learns by AdamW, at the same learning rate.",
    )
    betas: tuple[float, float] = option(
        (0.9, 0.95), help="AdamW's decay rates.", validator=check.deep_iterable(check.and_(NOT_NEGATIVE, check.lt(1.0)))
    )
    eps: float = option(1e-8, help="AdamW's epsilon.", validator=ABOVE_ZERO)
    momentum: float = option(0.95, help="Muon's momentum.", validator=check.and_(NOT_NEGATIVE, check.lt(1.0)))
    weight_decay: float = option(0.0, help="Decoupled weight decay.", validator=NOT_NEGATIVE, dynamic=True)
    clip_norm: float = option(
        1.0, help="Largest global gradient norm; 0 does not clip.", validator=NOT_NEGATIVE, dynamic=True
    )
    schedule: Literal["constant", "linear", "cosine"] = option("constant", help="Shape after the warm-up steps.")
    warmup_steps: int = option(0, help="Steps of linear rise from 0 to `lr`.", validator=NOT_NEGATIVE)
    final_lr_ratio: float = option(0.1, help="Last learning rate over the peak (linear, cosine).", validator=FRACTION)


@attrs.frozen(kw_only=True)
class CriticConfig:
    """A head on the policy that estimates the return to come, for algorithms that need one."""

    lr: float = option(1e-3, help="Its learning rate.", validator=ABOVE_ZERO)
    trunk: bool = option(True, help="Whether its error trains the policy's layers too, or the head alone.")


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
    """Parallelism of a policy replica over its mesh, and what it trades for memory."""

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
    offload_activations: bool = option(
        False, help="Keep what layers save for the backward pass in the machine's memory, copied beside their work."
    )
    reshard_after_forward: Literal["auto", "always", "never"] = option(
        "auto",
        help="Whether FSDP frees a layer's gathered weights before its backward pass; `auto` does unless `pp` > 1.",
    )
    cpu_offload: bool = option(
        False,
        help="Keep weights, gradients and optimizer of an accelerator in CPU memory; training waits for their copies.",
    )
    compile: Literal["auto", "on", "off"] = option("auto", help="Compile each layer; `auto` does on CUDA.")


@attrs.frozen(kw_only=True)
class Float8Config:
    """8-bit matrix products in training (float8 e4m3 forward, scaled as they are made)."""

    scaling: Literal["none", "tensorwise", "rowwise"] = option(
        "none", help="One scale a tensor, or one a row; `none` keeps the compute precision."
    )
    skip: tuple[str, ...] = option(
        ("lm_head",), help="Parts of names of linear layers, or of experts, that stay as they are."
    )


@attrs.frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685): the weights stay, two small matrices beside each linear layer learn."""

    rank: int = option(16, help="Rank of the adapters.", validator=POSITIVE)
    alpha: float = option(32.0, help="Their scale is alpha / rank.", validator=ABOVE_ZERO)
    modules: tuple[str, ...] = option(
        ("all-linear",), help="Last parts of names of the linear layers to adapt; `all-linear` is all but the output."
    )


@attrs.frozen(kw_only=True)
class AverageConfig:
    """An exponential moving average of the weights: after each step, decay · average + (1 - decay) · weights."""

    decay: float = option(
        0.999,
        help="What of the average stays at a step; less than 1.",
        validator=check.and_(check.ge(0.0), check.lt(1.0)),
    )
    growth: float | None = option(
        None,
        help="The decay of step k of a stage is growth · k until that reaches `decay`; absent: `decay` throughout.",
        validator=check.optional(ABOVE_ZERO),
    )
    publish: bool = option(
        False, help="Whether rollout replicas get the average, so that it generates and is what is evaluated."
    )
    export: bool | None = option(
        None, help="Whether `cosmos export` writes the average; absent: where it is published."
    )

    @property
    def is_exported(self) -> bool:
        """True if `cosmos export` writes it, unless told otherwise."""
        return self.publish if self.export is None else self.export


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """The checkpoints to save and to keep."""

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
    average: AverageConfig | None = option(None, help="Keep an exponential moving average of the weights.")
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, help="Checkpoints.")


@attrs.frozen(kw_only=True)
class SamplingConfig:
    """The sampling of training completions."""

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
    placement: Literal["separate", "colocated"] = option(
        "separate", help="`colocated`: on the policy's GPUs, in turns: one pool sleeps while the other works."
    )
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
    """The pace of the two pools, and the way of weights between them."""

    mode: Literal["async", "sync"] = option("async", help="`sync` generates each batch with the weights it trains.")
    max_staleness: int = option(
        2,
        help="Most steps that a sample's oldest weights may lag the weights it trains; sync mode lags none.",
        validator=NOT_NEGATIVE,
        dynamic=True,
    )
    slow_prompts: Literal["wait", "drop"] = option(
        "wait",
        help="Where prompts in flight take so long that a step would make them stale: the step waits for one of them, "
        "or goes on, and they are dropped, so that a run learns from short completions.",
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
