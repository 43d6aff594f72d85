"""How a run trains: optimizer, warm-up, mesh, precision, adapters, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config.schema.fields import ABOVE_ZERO, FRACTION, NOT_NEGATIVE, POSITIVE, option
from cosmos_core.types import JSON


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
        """Whether `cosmos export` writes it, unless told otherwise."""
        return self.publish if self.export is None else self.export


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
    average: AverageConfig | None = option(None, help="Keep an exponential moving average of the weights.")
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, help="Checkpoints.")
