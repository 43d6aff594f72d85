"""From a recipe's `[policy]` to the layout that a model plugin is given."""

from __future__ import annotations

from typing import Final

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.protocols import Layout, Lora, Mesh

STAGES_PER_RANK: Final = {"1f1b": 1, "interleaved": 2, "zero-bubble": 2}
DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}


def layout_of(policy: PolicyConfig, mesh: Mesh, device_type: str) -> Layout:
    """How the replica that this process belongs to spreads its module."""
    parallel, lora = policy.parallel, policy.lora
    is_pipeline = mesh.size("pp") > 1
    return Layout(
        mesh=mesh,
        micro_batch_precision=DTYPES[policy.precision],
        sequence_parallel=parallel.sequence_parallel,
        context=parallel.context,
        stages_per_rank=STAGES_PER_RANK[parallel.schedule] if is_pipeline else 1,
        is_v_shaped=is_pipeline and parallel.schedule == "zero-bubble",
        reshard_after_forward={"always": True, "never": False, "auto": not is_pipeline}[parallel.reshard_after_forward],
        recompute=parallel.recompute,
        cpu_offload=parallel.cpu_offload and device_type != "cpu",
        compile={"on": True, "off": False, "auto": device_type == "cuda"}[parallel.compile],
        float8=policy.float8.scaling,
        float8_skip=policy.float8.skip,
        lora=None if lora is None else Lora(rank=lora.rank, alpha=lora.alpha, modules=lora.modules),
    )
