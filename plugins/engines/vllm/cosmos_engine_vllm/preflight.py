"""The checks of a run on vLLM before any process starts, without importing it (`Provider.preflight`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cosmos_core.errors import EngineError
from cosmos_core.protocols import PlannedRun, Preflight
from cosmos_core.protocols.vision import VisionModel
from cosmos_engine_vllm.options import VllmOptions

LEAST_TEMPERATURE: Final = 0.01
"""Below it, vLLM draws at another temperature than was asked for."""
CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Of vLLM's attention on a CPU."""

_COMPILED_BYTES: Final = 1 << 30
"""Of a GPU, what kernels, their workspaces and CUDA graphs take, about, outside of what vLLM gives up in its sleep."""


def preflight(options: VllmOptions, planned: PlannedRun) -> Preflight:
    """The settings of a run that vLLM cannot serve, and the packages that it lacks here."""
    # Imported here so that listing plugins needs no torch; planning has imported it with the model.
    from cosmos_engine_vllm.installation import check_installed  # noqa: PLC0415

    device = "cuda" if planned.device == "cuda" or (planned.device == "auto" and planned.has_gpu) else "cpu"
    problems: list[str] = [*_sampling(planned), *_media(planned), *_experts(options, planned)]
    absent: list[str] = []
    # Where the device is left open, the run may be for another machine than this.
    (problems if planned.device == "cpu" else absent).extend(_on_cpu(planned) if device == "cpu" else ())
    try:
        check_installed(device)
    except EngineError as error:
        absent.append(str(error))
    return Preflight(
        problems=tuple(problems),
        absent="\n".join(absent),
        gpu_share=options.memory_share,
        gpu_share_key="rollout.engine.options.memory_share",
        outside_bytes=_COMPILED_BYTES if options.compile else 0,
        builds_on_host=True,
        cache_bytes=int(options.cache_gib * 2**30) if planned.device == "cpu" else 0,
        cache_key="rollout.engine.options.cache_gib",
    )


def needs_one_process(num_ranks: int, architecture: str) -> str:
    """The reason why several processes do not serve a model that sees images."""
    return (
        f"rollout.mesh: {num_ranks} processes of vLLM, and {architecture} sees images: it is served by a vLLM of one "
        "process only; set tp = 1, or use the engine 'embedded'"
    )


def _sampling(planned: PlannedRun) -> Iterator[str]:
    for key, temperature in planned.temperatures.items():
        if 0 < temperature < LEAST_TEMPERATURE:
            yield (
                f"{key}: {temperature:g}, and vLLM draws at temperatures from {LEAST_TEMPERATURE} on, or greedily at "
                "0; raise it, or use the engine 'embedded'"
            )


def _media(planned: PlannedRun) -> Iterator[str]:
    tells = isinstance(planned.model, VisionModel) and planned.model.shown is not None
    if planned.num_ranks > 1 and tells:
        yield needs_one_process(planned.num_ranks, planned.facts.architecture)
    if planned.shows_media and not tells:
        yield (
            f"rollout.engine.plugin: 'vllm' has a vision tower of its own, and {type(planned.model).__name__} does not "
            "say what its prompts show in a way that it takes (cosmos_core.protocols.vision.VisionModel.shown); use "
            "the engine 'embedded'"
        )


def _experts(options: VllmOptions, planned: PlannedRun) -> Iterator[str]:
    key, parts = "rollout.engine.options.expert_parallel", planned.facts.parts
    if options.expert_parallel and parts and not any(part.num_expert_parameters for part in parts):
        yield f"{key}: true, and {planned.facts.architecture} has no experts; leave it out"
    elif options.expert_parallel and planned.num_ranks == 1:
        yield f"{key}: true, and with rollout.mesh.tp = 1 one process has all experts; raise tp, or leave it out"


def _on_cpu(planned: PlannedRun) -> Iterator[str]:
    size = planned.facts.head_size
    if size and size not in CPU_HEAD_SIZES:
        known = ", ".join(map(str, CPU_HEAD_SIZES))
        yield (
            f"rollout.engine.plugin: 'vllm' on a CPU has attention for heads of {known} values, and those of "
            f"{planned.facts.architecture} have {size}; change head_dim in [model.config], or use the engine 'embedded'"
        )
    if planned.sleeps:
        found = "rollout.device is 'cpu'" if planned.device == "cpu" else "no GPU was found here"
        yield (
            f"rollout.placement: 'colocated', and {found}: vLLM can give up the memory of GPUs only, not that of a "
            "CPU; use the engine 'embedded', or rollout.placement = 'separate'"
        )
