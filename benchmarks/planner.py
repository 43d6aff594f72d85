"""Seconds of one core to plan the weights of DeepSeek-V3 (671 B parameters), 512 policy ranks to 256 rollout ranks.

    python benchmarks/planner.py [--config recipes/configs/DeepSeek-V3/config.json]

policy: pp stages of dp_shard 32, its experts over ep 32, in one replica or several. rollout: 16 replicas of tp 16,
their experts over the same 16. Ranks are on hosts of 8, hosts in racks of 4. The slices of every rank are objects of
their own, as if they had come by network. plan: from the shard maps to shares of load; slices: what every rank gets, as
arrays; one rank: the slices of one, as its receiver asks for them. most: the largest load over the mean; layers do not
divide by 16 or 8 stages, which no choice of source evens out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import median

import attrs
import numpy as np
from rich.console import Console
from rich.table import Table

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights.planner import Member, Plan
from cosmos_core.weights.shards import ShardMap, TensorFacts, torch_dtype
from cosmos_core.weights.topology import Place

DTYPE = "bfloat16"
GPUS_A_HOST = 8
HOSTS_A_RACK = 4


@attrs.frozen
class Tensor:
    """A tensor of the model: its layer, its expert if it is one's, and the dim that `tp` splits, -1 for none."""

    shape: tuple[int, ...]
    layer: int
    expert: int = -1
    tp_dim: int = -1


def deepseek(config: dict[str, int]) -> dict[str, Tensor]:
    """Tensors of a DeepSeek-V3 checkpoint by name, without the layer that predicts a token more."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    last = config["num_hidden_layers"] - 1
    tensors = {
        "model.embed_tokens.weight": Tensor((config["vocab_size"], hidden), 0, tp_dim=0),
        "model.norm.weight": Tensor((hidden,), last),
        "lm_head.weight": Tensor((config["vocab_size"], hidden), last, tp_dim=0),
    }

    def mlp(prefix: str, layer: int, wide: int, expert: int = -1) -> None:
        split = -1 if expert >= 0 else 0
        tensors[f"{prefix}.gate_proj.weight"] = Tensor((wide, hidden), layer, expert, split)
        tensors[f"{prefix}.up_proj.weight"] = Tensor((wide, hidden), layer, expert, split)
        tensors[f"{prefix}.down_proj.weight"] = Tensor((hidden, wide), layer, expert, -1 if expert >= 0 else 1)

    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        attention = {
            "q_a_proj": ((q_rank, hidden), -1),
            "q_a_layernorm": ((q_rank,), -1),
            "q_b_proj": ((heads * (nope + rope), q_rank), 0),
            "kv_a_proj_with_mqa": ((kv_rank + rope, hidden), -1),
            "kv_a_layernorm": ((kv_rank,), -1),
            "kv_b_proj": ((heads * (nope + value), kv_rank), 0),
            "o_proj": ((hidden, heads * value), 1),
        }
        for part, (shape, dim) in attention.items():
            tensors[f"{name}.self_attn.{part}.weight"] = Tensor(shape, layer, tp_dim=dim)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = Tensor((hidden,), layer)
        if layer < config["first_k_dense_replace"]:
            mlp(f"{name}.mlp", layer, config["intermediate_size"])
            continue
        experts, wide = config["n_routed_experts"], config["moe_intermediate_size"]
        tensors[f"{name}.mlp.gate.weight"] = Tensor((experts, hidden), layer)
        tensors[f"{name}.mlp.gate.e_score_correction_bias"] = Tensor((experts,), layer)
        mlp(f"{name}.mlp.shared_experts", layer, wide * config["n_shared_experts"])
        for expert in range(experts):
            mlp(f"{name}.mlp.experts.{expert}", layer, wide, expert)
    return tensors


def chunk(total: int, number: int, rank: int) -> tuple[int, int]:
    """First index and size of one of `number` parts, as `torch.chunk` makes them."""
    step = -(-total // number)
    first, end = min(rank * step, total), min((rank + 1) * step, total)
    return first, end - first


def region(name: str, tensor: Tensor, dim: int, number: int, rank: int) -> TensorSlice:
    """A rank's part of a tensor that is split along `dim` (whole if negative)."""
    start, shape = [0] * len(tensor.shape), list(tensor.shape)
    if dim >= 0:
        start[dim], shape[dim] = chunk(tensor.shape[dim], number, rank)
    return TensorSlice(name=name, start=tuple(start), shape=tuple(shape))


def replica(tensors: dict[str, Tensor], *, pp: int, shard: int, is_policy: bool) -> ShardMap:
    """A replica of `pp` stages of `shard` ranks, over which the experts and the rest of the tensors are split."""
    layers = 1 + max(tensor.layer for tensor in tensors.values())
    experts = 1 + max(tensor.expert for tensor in tensors.values())
    ranks: dict[int, list[TensorSlice]] = {rank: [] for rank in range(pp * shard)}
    for name, tensor in tensors.items():
        stage = next(s for s in range(pp) if tensor.layer < sum(chunk(layers, pp, s)))
        if tensor.expert >= 0:
            owner = next(r for r in range(shard) if tensor.expert < sum(chunk(experts, shard, r)))
            ranks[stage * shard + owner].append(region(name, tensor, -1, 1, 0))
            continue
        for rank in range(shard):
            ranks[stage * shard + rank].append(region(name, tensor, 0 if is_policy else tensor.tp_dim, shard, rank))
    facts = {name: TensorFacts(shape=tensor.shape, dtype=DTYPE) for name, tensor in tensors.items()}
    return ShardMap(tensors=facts, ranks={rank: tuple(held) for rank, held in ranks.items()})


def placed(shards: ShardMap, first_gpu: int) -> Member:
    """A replica on consecutive GPUs."""
    hosts = {rank: (first_gpu + rank) // GPUS_A_HOST for rank in shards.ranks}
    return Member(
        shards=shards,
        places={rank: Place(host=f"h{host}", rack=f"r{host // HOSTS_A_RACK}") for rank, host in hosts.items()},
    )


def measure(tensors: dict[str, Tensor], *, replicas: int, pp: int, shard: int) -> list[str]:
    """Plan once: seconds, and what the plan is like."""
    policy = [
        placed(replica(tensors, pp=pp, shard=shard, is_policy=True), index * pp * shard) for index in range(replicas)
    ]
    num_policy = replicas * pp * shard
    rollout = [
        placed(replica(tensors, pp=1, shard=16, is_policy=False), num_policy + index * 16) for index in range(16)
    ]
    start = time.process_time()
    plan = Plan(policy, rollout)
    planned = time.process_time()
    transfers = [plan.transfers(target) for target in range(len(plan.targets))]
    listed = time.process_time()
    singles = [_seconds(plan, target) for target in range(5)]
    loads = np.zeros(len(plan.sources), np.int64)
    for each in transfers:
        np.add.at(loads, each.source_M, each.nbytes_M)
    needed = sum(_nbytes(piece) for each in rollout for held in each.shards.ranks.values() for piece in held)
    assert loads.sum() == needed, "more, or less, is sent than the ranks lack"
    return [
        f"{replicas} x pp {pp} x 32",
        f"{sum(len(each.source_M) for each in transfers):,}",
        f"{loads.sum() / 1e12:.1f}",
        f"{planned - start:.2f}",
        f"{listed - planned:.2f}",
        f"{listed - start:.2f}",
        f"{median(singles):.2f}",
        f"{loads.max() / loads.mean():.3f}",
    ]


def _seconds(plan: Plan, target: int) -> float:
    start = time.process_time()
    plan.slices(target)
    return time.process_time() - start


def _nbytes(piece: TensorSlice) -> int:
    return math.prod(piece.shape) * torch_dtype(DTYPE).itemsize


def main() -> None:
    """Plan for several layouts of the policy and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("recipes/configs/DeepSeek-V3/config.json"))
    config = json.loads(parser.parse_args().config.read_text())
    tensors = deepseek(config)
    billions = sum(math.prod(tensor.shape) for tensor in tensors.values()) / 1e9
    table = Table(title=f"{len(tensors):,} tensors of {billions:.0f} B parameters, 512 to 256 ranks; seconds of CPU")
    columns = ("slices", "TB", "plan s", "slices s", "in all s", "one rank s", "most")
    table.add_column("policy")
    for column in columns:
        table.add_column(column, justify="right")
    for replicas, pp in ((1, 16), (2, 8), (16, 1)):
        table.add_row(*measure(tensors, replicas=replicas, pp=pp, shard=32))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
