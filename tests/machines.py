"""Recipes for three sizes of machine, as planned: `python -m tests.machines` writes the table of the hardware guide."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.loading import load_recipe
from cosmos_core.config.schema import MeshConfig
from cosmos_core.config.structure import unstructure
from cosmos_core.run.planning.footprint import host_memory, memory_by_pool, verdicts
from cosmos_core.run.planning.plan import Plan, make_plan
from cosmos_core.run.planning.processes import gpus

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "hardware.md"
PLACE = re.compile("(?<=<!-- by tests.machines -->\n)[^<]*(?=<!-- until here -->)")
H100: Final = "a GPU of 80 GB (H100)"
NODE: Final = 8
MEMORY: Final = 500
"""GB that any machine of GPUs at this size has."""
MACHINES: Final = {1: "one GPU", NODE: "one node", 4 * NODE: "four nodes"}


@attrs.frozen
class Case:
    """A recipe on a machine of so many GPUs, and what is set in it there; `fits` is what the plan has to say."""

    machine: int
    recipe: str
    sets: tuple[str, ...] = ()
    fits: bool = True

    @property
    def path(self) -> Path:
        return ROOT / "recipes" / f"{self.recipe}.toml"

    @property
    def line(self) -> str:
        """The settings, as a command takes them."""
        return " ".join(f"--set {each}" for each in self.sets)

    def plan(self, folder: Path) -> Plan:
        """The plan of a run there."""
        return make_plan(load_recipe(self.path, overrides=list(self.sets)), self.path, folder)


def mesh(**sizes: int) -> tuple[str, ...]:
    """Settings of the policy's mesh."""
    return tuple(f"policy.mesh.{axis}={size}" for axis, size in sizes.items())


ADAPTERS: Final = ("policy.parallel.recompute=full", "policy.lora.rank=32", "policy.optimizer.lr=1e-4")
OFFLOADED: Final = ("policy.parallel.recompute=full", "policy.parallel.cpu_offload=true")
COLOCATED: Final = ("rollout.replicas=8", "rollout.placement=colocated")
CASES: Final = (
    Case(1, "grpo-qwen3-8b-one-gpu"),
    Case(NODE, "grpo-qwen3-8b"),
    Case(4 * NODE, "grpo-qwen3-8b", (*mesh(dp_replicate=2, dp_shard=8), "rollout.replicas=16")),
    Case(1, "sft-qwen3-8b", (*mesh(dp_shard=1, cp=1), *ADAPTERS)),
    Case(NODE, "sft-qwen3-8b"),
    Case(4 * NODE, "sft-qwen3-8b", mesh(dp_replicate=4)),
    Case(1, "sft-qwen3-32b", (*mesh(dp_shard=1, tp=1), *ADAPTERS), fits=False),
    Case(NODE, "grpo-qwen3-32b-node"),
    Case(
        NODE,
        "grpo-qwen3-32b-node",
        ("policy.parallel.cpu_offload=false", "policy.lora.rank=32", "policy.optimizer.lr=1e-5"),
    ),
    Case(4 * NODE, "grpo-qwen3-32b"),
    Case(NODE, "sft-qwen3-32b", (*mesh(dp_shard=8, tp=1), *OFFLOADED)),
    Case(4 * NODE, "sft-qwen3-32b", mesh(dp_shard=8)),
    Case(1, "sft-qwen3-30b-a3b", (*mesh(dp_shard=1, ep=1), *ADAPTERS), fits=False),
    Case(NODE, "grpo-qwen3-30b-a3b", (*mesh(dp_shard=8), "policy.micro_batch_units=4096", *COLOCATED)),
    Case(4 * NODE, "grpo-qwen3-30b-a3b"),
    Case(NODE, "sft-qwen3-30b-a3b"),
    Case(4 * NODE, "sft-qwen3-30b-a3b", mesh(dp_shard=32)),
)


def needed(plan: Plan) -> int:
    """GPUs of the whole run."""
    return gpus(plan.job.recipe, uses_rollouts=plan.job.uses_rollouts)


def header(path: Path) -> str:
    """The comment that a recipe begins with, as one line."""
    return re.sub(r"\s*\\?\n#\s*", " ", path.read_text().partition("\n\n")[0])


def check_header(path: Path, plan: Plan) -> None:
    """Check that a recipe's comment tells its GPUs, and a launcher's command where a node has fewer."""
    told, number = header(path), needed(plan)
    assert re.search(rf"\bon {number} GPUs?\b", told), f"{path.name} is for {number} GPUs"
    assert (f"cosmos launch slurm recipes/{path.relative_to(ROOT / 'recipes')}" in told) == (number > NODE), path.name


def table(folder: Path) -> Iterator[str]:
    """Its lines."""
    yield "| model | machine | recipe | GPUs | trains | generates | GiB to train | GiB to generate |"
    yield "|---|---|---|---|---|---|---|---|"
    for index, case in enumerate(CASES):
        plan = case.plan(folder / str(index))
        told = verdicts(plan)
        fits = needed(plan) <= case.machine and all(H100 in each for each in told.values())
        assert fits == case.fits, (case, needed(plan), told)
        assert not fits or case.line in header(case.path), f"{case.path}: tell {case.line}"
        memory = round(host_memory(plan) / 1e9, -1)
        if fits and case.machine <= NODE and memory > MEMORY:
            assert f"{memory:,.0f} GB" in header(case.path), f"{case.path}: tell the machine's memory, {memory:,.0f} GB"
        cells = _cells(case, plan) if fits else [f"none; adapters alone take {told['policy']}", *[""] * 5]
        name = Path(plan.job.recipe.model.path).name
        yield f"| {' | '.join([name, MACHINES[case.machine], *cells])} |"


def _cells(case: Case, plan: Plan) -> list[str]:
    policy, rollout, sizes = plan.job.recipe.policy, plan.job.recipe.rollout, _sizes(plan)
    how = ", adapters" if policy.lora else ", offloaded" if policy.parallel.cpu_offload else ""
    return [
        f"`{case.recipe}`" + (" with its header's settings" if case.sets else ""),
        f"{needed(plan)}" + (", in turns" if plan.job.takes_turns else ""),
        _processes(policy.replicas, policy.mesh) + how,
        _processes(rollout.replicas, rollout.mesh) if plan.job.uses_rollouts else "",
        sizes["policy"],
        sizes.get("rollout", ""),
    ]


def _processes(replicas: int, sizes: MeshConfig) -> str:
    axes = [f"`{axis}` {size}" for axis, size in unstructure(sizes).items() if size > 1]
    return " · ".join([*([f"{replicas} replicas"] if replicas > 1 else []), *axes]) or "1 process"


def _sizes(plan: Plan) -> dict[str, str]:
    """Memory of the largest process of each pool: of its GPU, and of the machine."""
    found = {}
    for pool, ranks in memory_by_pool(plan).items():
        device = max(sum(rank.device.values()) for rank in ranks)
        host = max(sum(rank.host.values()) for rank in ranks)
        found[pool] = " + ".join(f"{each / (1 << 30):.0f}" for each in (device, host) if each)
    return found


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as name:
        told = "\n".join(table(Path(name))) + "\n"
    sys.stdout.write(told)
    PAGE.write_text(PLACE.sub(lambda _: told, PAGE.read_text()))
