"""The layout of a replica, made from `[policy]`, and checked against a model's facts.

Source of the v shape of pipelines: arXiv:2401.10241, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Final, get_args

from cosmos_core.config.mesh import choices, divisors, mesh_problems
from cosmos_core.config.problems import suggestion
from cosmos_core.config.schema import MeshConfig, PolicyConfig
from cosmos_core.config.training import DTYPES
from cosmos_core.models.parallel.float8 import skip_problems
from cosmos_core.models.parallel.stages import leading_problems
from cosmos_core.protocols import Layout, ModelCapabilities, ModelFacts
from cosmos_core.protocols.facts import Extent
from cosmos_core.protocols.layout import Axis, Lora, Mesh
from cosmos_core.protocols.quantization import Format
from cosmos_core.weights.shards import is_placeable

STAGES_PER_RANK: Final = {"1f1b": 1, "interleaved": 2, "zero-bubble": 2}


def layout_of(policy: PolicyConfig, mesh: Mesh, device_type: str) -> Layout:
    """The layout of the replica that this process belongs to."""
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
        offload_activations=parallel.offload_activations,
        cpu_offload=parallel.cpu_offload and device_type != "cpu",
        compile={"on": True, "off": False, "auto": device_type == "cuda"}[parallel.compile],
        float8=policy.float8.scaling,
        float8_skip=policy.float8.skip,
        lora=None if lora is None else Lora(rank=lora.rank, alpha=lora.alpha, modules=lora.modules),
    )


def misfits(policy: PolicyConfig, capabilities: ModelCapabilities, facts: ModelFacts) -> list[str]:
    """The reasons why the policy's mesh cannot hold the model; empty if it can.

    An axis that the model cannot use is told first: why, if the model knows, else that its plugin does not declare it.
    What follows from such an axis is not told.
    """
    found = _unusable(policy.mesh, capabilities, facts)
    checks = (_stages, _extents, _context, _vocabulary, _units, _adapted, _computed_in_float8)
    return found or [*mesh_problems(policy.mesh), *(told for check in checks for told in check(policy, facts))]


def rollout_misfits(mesh: MeshConfig, capabilities: ModelCapabilities, facts: ModelFacts) -> list[str]:
    """The reasons why a rollout replica's processes cannot share layers (`rollout.mesh.tp`); empty if they can."""
    policy = PolicyConfig(mesh=MeshConfig(tp=mesh.tp))
    found = _unusable(policy.mesh, capabilities, facts) or [*_extents(policy, facts), *_vocabulary(policy, facts)]
    return [each.replace("policy.", "rollout.") for each in found]


def cut_bytes(tp: int, facts: ModelFacts, form: Format) -> Iterator[str]:
    """Columns of matrices that `policy.mesh.tp` splits within a byte of their codes."""
    widths = {name: facts.matrices[name][-1] for name in facts.column_split & facts.matrices.keys()}
    cut = [name for name, width in widths.items() if _cuts(width, tp, form)]
    if not cut:
        return
    first = min(cut, key=lambda name: (len(name), name))
    fitting = [size for size in _fitting(facts, "tp") if not any(_cuts(width, size, form) for width in widths.values())]
    more = f", and so of {len(cut) - 1} more" if len(cut) > 1 else ""
    yield (
        f"rollout.quantization: {form.name!r} has {form.per_byte} columns in a byte, and policy.mesh.tp = {tp} gives a "
        f"process {math.ceil(widths[first] / tp)} of the {widths[first]} columns of {first}{more}; tp can be "
        f"{choices(fitting)}, or take 'fp8' or 'mxfp8', whose codes are a byte each"
    )


def _cuts(columns: int, tp: int, form: Format) -> bool:
    """Tell whether a process begins in the middle of a byte of codes; all have as many columns, but the last."""
    each = math.ceil(columns / tp)
    return each < columns and each % form.per_byte != 0


def _unusable(mesh: MeshConfig, capabilities: ModelCapabilities, facts: ModelFacts) -> list[str]:
    found = [
        f"policy.mesh.{axis}: {getattr(mesh, axis)}, but {facts.architecture} cannot be spread over {axis}: {reason}; "
        f"set {axis} = 1"
        for axis, reason in facts.impossible.items()
        if getattr(mesh, axis) > 1
    ]
    return [*found, *undeclared(mesh, capabilities.mesh_axes | facts.impossible.keys())]


def undeclared(mesh: MeshConfig, declared: Collection[Axis]) -> Iterator[str]:
    """Axes greater than one that the model's plugin does not declare."""
    allowed = [axis for axis in get_args(Axis) if axis in declared]
    for axis in get_args(Axis):
        size = getattr(mesh, axis)
        if size > 1 and axis not in declared:
            what = f"its plugin can use {', '.join(allowed)}" if allowed else "its plugin trains in one process only"
            yield (
                f"policy.mesh.{axis}: {size}, but the model's plugin does not declare the axis {axis} "
                f"(ModelCapabilities.mesh_axes); {what}, and policy.replicas spreads the work besides"
            )


def _stages(policy: PolicyConfig, facts: ModelFacts) -> Iterator[str]:
    """More stages than layers, or too few layers in the first one."""
    pp, each = policy.mesh.pp, STAGES_PER_RANK[policy.parallel.schedule]
    if pp == 1 or pp * each <= facts.num_layers:
        yield from leading_problems(
            facts.architecture,
            facts.num_leading_layers,
            facts.num_layers,
            num_stages=pp * each if pp > 1 else 1,
            is_split=policy.mesh.tp > 1 and policy.parallel.sequence_parallel,
        )
        return
    many = (
        f"pp = {pp}" if each == 1 else f"pp = {pp} with {each} stages a process (schedule {policy.parallel.schedule!r})"
    )
    yield (
        f"policy.mesh.pp: {many} makes {pp * each} stages of {facts.num_layers} layers; "
        f"pp can be at most {max(facts.num_layers // each, 1)}"
    )


def _vocabulary(policy: PolicyConfig, facts: ModelFacts) -> Iterator[str]:
    """A vocabulary of which a process of `tp` would have no token, or whose uneven parts cannot be sharded again."""
    tp, size = policy.mesh.tp, facts.vocab_size
    if 0 < size <= math.ceil(size / tp) * (tp - 1):
        yield (
            f"policy.mesh.tp: {tp} leaves processes without a token of a vocabulary of {size}, of which each takes "
            f"{math.ceil(size / tp)}; lower tp"
        )
        return
    shards = policy.mesh.dp_shard * policy.mesh.cp
    if size % tp and shards > 1 and not is_placeable(size, tp, shards):
        fitting = [each for each in range(2, shards) if shards % each == 0 and is_placeable(size, tp, each)]
        instead = f"dp_shard · cp can be {choices([1, *fitting])}" if fitting else "set dp_shard · cp = 1"
        yield (
            f"policy.mesh.dp_shard: the {size} tokens of the vocabulary are split unevenly over tp = {tp}, and their "
            f"parts cannot be sharded again over dp_shard · cp = {shards}; {instead}, take a tp that divides {size}, "
            f"or raise vocab_size in [model.config] to {math.ceil(size / tp) * tp}"
        )


def _extents(policy: PolicyConfig, facts: ModelFacts) -> Iterator[str]:
    """Numbers of the model that an axis does not divide."""
    for extent in facts.extents:
        size = getattr(policy.mesh, extent.axis)
        if size > 1 and extent.axis != "cp" and not _fits(extent, size):
            yield (
                f"policy.mesh.{extent.axis}: {size} does not divide {extent.size} {extent.name}; "
                f"{extent.axis} can be {choices(_fitting(facts, extent.axis))}"
            )


def _context(policy: PolicyConfig, facts: ModelFacts) -> Iterator[str]:
    """Attention over `cp` in a way that the model has not, or of numbers that an exchange of heads does not divide."""
    cp, tp, method, known = policy.mesh.cp, policy.mesh.tp, policy.parallel.context, facts.context_methods
    if cp == 1:
        return
    if method not in {"auto", *known}:
        yield (
            f"policy.parallel.context: {method!r}, but {facts.architecture} has attention over cp by "
            f"{' or '.join(sorted(known))} only; take one of these, or 'auto'"
        )
    elif method == "ulysses" or known == {"ulysses"}:
        # Each process of `tp` has its part of the heads, and `cp` divides those again.
        divided = {each.name: each.size // tp for each in facts.extents if each.axis == "cp" and each.size % tp == 0}
        instead = ", or take context = 'gather'" if "gather" in known else ""
        for name, count in divided.items():
            if count % cp:
                fitting = choices(divisors(math.gcd(*divided.values())))
                of_each = f" of each process ({count * tp} / tp = {tp})" if tp > 1 else ""
                yield (
                    f"policy.mesh.cp: {cp} does not divide the {count} {name}{of_each}, which 'ulysses' "
                    f"(policy.parallel.context) needs; cp can be {fitting}{instead}"
                )


def _fits(extent: Extent, size: int) -> bool:
    return extent.size % size == 0 or (extent.is_shared and size % extent.size == 0)


def _fitting(facts: ModelFacts, axis: Axis) -> list[int]:
    """Sizes of an axis that fit all that it must divide."""
    extents = [extent for extent in facts.extents if extent.axis == axis]
    exact = [extent.size for extent in extents if not extent.is_shared]
    candidates = divisors(math.gcd(*exact)) if exact else divisors(math.lcm(*(extent.size for extent in extents)))
    return [size for size in candidates if all(_fits(extent, size) for extent in extents)]


def _units(policy: PolicyConfig, facts: ModelFacts) -> Iterator[str]:
    """A micro-batch whose tokens its processes cannot share evenly; without a vocabulary, units are no tokens."""
    parts = policy.mesh.cp * policy.mesh.tp
    if facts.vocab_size and policy.micro_batch_units % parts:
        down = policy.micro_batch_units // parts * parts
        yield (
            f"policy.micro_batch_units: {policy.micro_batch_units} is no multiple of cp · tp = {parts}, by which each "
            f"row is split; take {choices([down, down + parts] if down else [parts])}"
        )


def _adapted(policy: PolicyConfig, facts: ModelFacts) -> Iterator[str]:
    """Adapters of layers that the model does not have."""
    known = {name for part in facts.parts if part.is_layer for name in part.widths}
    if policy.lora is None or not known:
        return
    for wanted in policy.lora.modules:
        if wanted not in known | {"all-linear"}:
            yield (
                f"policy.lora.modules: no linear layer of {facts.architecture} is called {wanted!r}; "
                f"{suggestion(wanted, sorted(known))}"
            )


def _computed_in_float8(policy: PolicyConfig, facts: ModelFacts) -> Iterator[str]:
    if policy.float8.scaling != "none" and facts.linear_layers:
        yield from skip_problems(policy.float8.skip, facts.linear_layers, facts.architecture)
