"""How a run generates: engine, sampling, and how its weights follow those that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config.schema.fields import ABOVE_ZERO, LEAST_TEMPERATURE, NOT_NEGATIVE, POSITIVE, option
from cosmos_core.config.schema.training import MeshConfig
from cosmos_core.protocols.quantization import Quantization
from cosmos_core.types import JSON


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
