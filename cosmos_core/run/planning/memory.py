"""Estimates the memory of the processes of policy and rollout replicas, by part.

What a process keeps for its backward pass follows from what the model's parts keep per unit (`protocols.facts.Kept`),
from how the mesh splits that, and from how many micro-batches its pipeline schedule has in flight. Temporary buffers
inside operators are not counted.

Source: arXiv:2205.05198, section 4 (what tensor and sequence parallelism split); arXiv:2104.04473, section 2.2
(micro-batches in flight); arXiv:2401.10241, section 6 (those of the v-shaped schedule).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from cosmos_core.config.mesh import expert_shards, world_size
from cosmos_core.config.schema import PolicyConfig, Recipe
from cosmos_core.models.parallel.offload import BLOCK_BYTES
from cosmos_core.models.parallel.stages import layer_spans, stage_indices
from cosmos_core.policy.mesh.layout import STAGES_PER_RANK
from cosmos_core.protocols import EngineCapabilities, ModelFacts, Preflight
from cosmos_core.protocols.facts import Compute, ModelPart
from cosmos_core.protocols.frozen import FrozenRole
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.weights.wire import REQUEST_BYTES

ITEM_SIZES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2}
OUTPUT_COPIES: Final = 3
"""Float32 values for each value of the output layer: logits, log-probabilities, gradient."""
CACHE: Final = "KV cache (at most)"
CODES: Final = "codes and scales"
LATENT_COPIES: Final = 5
"""Float32 values for each value of a micro-batch's latents: these, targets, velocity, another model's, gradient."""


@attrs.frozen(kw_only=True)
class RankMemory:
    """Memory that alike processes of a replica hold.

    Attributes:
        name: Which ones: their place in the pipeline, if it has several.
        count: How many of one replica.
        device: Bytes by part, in the memory of the device it trains on.
        host: Bytes by part, in the machine's memory, for all devices.
        is_whole: Whether all parts are known; False where the model does not say what activations take.
    """

    name: str
    count: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    is_whole: bool


def policy_memory(
    recipe: Recipe,
    facts: ModelFacts,
    *,
    publishes: bool = True,
    frozen: Mapping[FrozenRole, ModelFacts] = MappingProxyType({}),
    references: int = 0,
    latents: Mapping[str, int] = MappingProxyType({}),
) -> tuple[RankMemory, ...]:
    """Each kind of process of one policy replica: those of one pipeline stage are alike, and neighbours may be.

    Args:
        recipe: The mesh, and how it is used.
        facts: Of the model.
        publishes: Whether rollout replicas read the weights.
        frozen: Of the models that the algorithm consults, by role.
        references: Bytes that a process with the output layer keeps of what these say.
        latents: Bytes that each process keeps in the machine's memory during a step (`latents.latent_bytes`).
    """
    mesh = recipe.policy.mesh
    of_rank = functools.partial(
        _Rank, recipe=recipe, facts=facts, publishes=publishes, frozen=frozen, references=references, latents=latents
    )
    each = [of_rank(place=place).memory() for place in range(mesh.pp)]
    found, first, per_stage = [], 0, world_size(mesh) // mesh.pp
    for _, run in itertools.groupby(each, key=lambda memory: (memory.device, memory.host)):
        alike = list(run)
        last = first + len(alike) - 1
        name = f"place {first}" if last == first else f"places {first}-{last}"
        name = name if mesh.pp > 1 else "each process"
        found.append(attrs.evolve(alike[0], name=name, count=per_stage * len(alike)))
        first = last + 1
    return tuple(found)


def version_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Bytes of one version of the weights as rollout replicas hold and are sent them."""
    quantised, others = quantised_bytes(recipe, facts), facts.num_parameters
    if quantised:
        others -= sum(math.prod(shape) for shape in facts.matrices.values())
    return quantised + ITEM_SIZES[recipe.rollout.precision] * others


def quantised_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Bytes of the codes and scales among them."""
    form = FORMATS.get(recipe.rollout.quantization)
    return 0 if form is None else sum(form.nbytes(shape) for shape in facts.matrices.values())


def num_whole(part: ModelPart, tp: int) -> int:
    """Parameters of one piece of a part that each process of `tp` has all of."""
    return part.num_whole_parameters + sum(count for heads, count in part.head_parameters.items() if heads % tp)


def whole_over_tp(policy: PolicyConfig, facts: ModelFacts) -> dict[str, int]:
    """Parameters of the model that each process of `tp` has all of, by what they are."""
    mesh = policy.mesh
    if mesh.tp == 1:
        return {}
    found: dict[str, int] = {}
    for part in facts.parts:
        for heads, count in part.head_parameters.items():
            if heads % mesh.tp:
                name = f"{heads} key-value heads, which {mesh.tp} does not divide"
                found[name] = found.get(name, 0) + part.count * count
    if mesh.ep == 1:
        found["experts, which only ep spreads"] = sum(part.count * part.num_expert_parameters for part in facts.parts)
    found["norms and others"] = sum(part.count * part.num_whole_parameters for part in facts.parts)
    return {name: count for name, count in found.items() if count}


@attrs.frozen(kw_only=True)
class _Rank:
    """A process at one place of the pipeline."""

    recipe: Recipe
    facts: ModelFacts
    place: int
    publishes: bool
    frozen: Mapping[FrozenRole, ModelFacts] = attrs.field(factory=dict)
    references: int = 0
    latents: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def policy(self) -> PolicyConfig:
        return self.recipe.policy

    @property
    def shards(self) -> int:
        """Processes over which FSDP spreads dense weights."""
        return self.policy.mesh.dp_shard * self.policy.mesh.cp

    @property
    def units(self) -> float:
        """Units of a micro-batch that this process evaluates; of denoising steps, which `cp` splits, shares."""
        rows = self.facts.rows_per_unit
        return math.ceil(self.policy.micro_batch_units * rows / self.policy.mesh.cp) / rows

    @property
    def compute(self) -> Compute:
        if self.policy.precision == "fp32":
            return "float32"
        return "autocast" if world_size(self.policy.mesh) == 1 else "bfloat16"

    @property
    def item(self) -> int:
        return ITEM_SIZES[self.policy.precision]

    @property
    def held(self) -> int:
        """Parameters that this process holds."""
        parts = [part for stage in self._stages() for part in stage]
        return sum(part.count * self._shard(part) for part in parts) + self._tied(parts)

    def memory(self) -> RankMemory:
        """Bytes by part."""
        stages = self._stages()
        parts = [part for stage in stages for part in stage]
        held, readers = self.held, min(self.recipe.rollout.replicas, self.recipe.sync.fan_out)
        trained = held if self.policy.lora is None else sum(part.count * self._adapters(part) for part in parts)
        frozen = 0 if self.policy.lora is None else held
        weights = {
            "parameters": 4 * (frozen + trained),
            "gradients": 4 * trained,
            "optimizer": self._moments(parts, trained),
            "average": 4 * trained if self.policy.average is not None else 0,
        }
        work = {
            "merged weight": self._merged(parts) if self.publishes else 0,
            "gathered weights": self._gathered(parts),
            "whole gradients": self._accumulated(parts),
            "activations": self._activations(stages, waits=False),
            "logits": self._logits(parts),
            "latents": LATENT_COPIES * 4 * self.policy.micro_batch_units * self.facts.latent_size,
            "reference predictions": self.references if self._has_output(parts) else 0,
            "communication": self._communication(parts),
            **(between_gpus(self.recipe, readers) if self.publishes else {}),
        }
        each = version_bytes(self.recipe, self.facts) / max(1, self.facts.num_parameters)
        published = {"published weights": math.ceil(2 * each * held)} if self.publishes else {}
        # Moments in 8 bits are saved as their values, and restored by way of them.
        is_coded = self._kinds == {"adamw-8bit"}
        saved = 4 * trained + (8 * trained if is_coded else weights["optimizer"]) + weights["average"]
        is_offloaded = self.policy.parallel.cpu_offload and self.policy.device != "cpu"
        device = {**(work if is_offloaded else {**weights, **work}), **self._frozen(waits=False)}
        return RankMemory(
            name="",
            count=1,
            device={name: size for name, size in device.items() if size},
            host={
                **({name: size for name, size in weights.items() if size} if is_offloaded else {}),
                "checkpoint copy": saved,
                **({"restored moments": 8 * trained} if is_coded else {}),
                **published,
                **({"activations": self._activations(stages, waits=True)} if self._offloads else {}),
                **self._frozen(waits=True),
                **self.latents,
            },
            is_whole=all(self.compute in part.kept for part in parts),
        )

    @property
    def _kinds(self) -> set[str]:
        """The optimizers of all stages."""
        return {stage.optimizer.kind for stage in (self.policy, self.recipe.warmup) if stage is not None}

    def _moments(self, parts: Sequence[ModelPart], trained: int) -> int:
        """Bytes of what the optimizer keeps, of the stage in which it is more; Muon has one moment of a matrix."""
        if "adamw" in self._kinds:
            return 8 * trained
        if self._kinds == {"adamw-8bit"}:
            # Codes of two moments, and a scale for each 256 of both.
            return math.ceil((2 + 8 / 256) * trained)
        if self.policy.lora is not None:
            return 4 * trained
        tp, layers = self.policy.mesh.tp, [part for part in parts if part.is_layer]
        split = [each.num_parameters - each.num_expert_parameters - num_whole(each, tp) for each in layers]
        matrices = sum(part.count * size for part, size in zip(layers, split, strict=True))
        return 8 * trained - 4 * matrices // (tp * self.shards)

    def _frozen(self, *, waits: bool) -> dict[str, int]:
        """Weights of frozen models: where they wait between uses, or in the memory of the device."""
        found: dict[str, int] = {}
        for role, facts in self.frozen.items():
            is_offloaded = self.recipe.frozen[role].placement == "offloaded" and self.policy.device != "cpu"
            precision = self.recipe.frozen[role].held(self.policy.precision, on_gpu=self.policy.device != "cpu")
            held = ITEM_SIZES[precision] * attrs.evolve(self, facts=facts, frozen={}).held
            # One process moves them there and back; several gather them layer by layer.
            is_here = is_offloaded if waits else not is_offloaded or world_size(self.policy.mesh) == 1
            if is_here:
                found[f"{role}'s parameters"] = held
        return found

    def _stages(self) -> list[list[ModelPart]]:
        """The parts of each pipeline stage that this process holds."""
        mesh, schedule = self.policy.mesh, self.policy.parallel.schedule
        parts = self.facts.parts or (ModelPart(name="model", num_parameters=self.facts.num_parameters),)
        per_process = STAGES_PER_RANK[schedule] if mesh.pp > 1 else 1
        num_layers = sum(part.count for part in parts if part.is_layer)
        if mesh.pp == 1 or num_layers == 0:
            return [list(parts)]
        spans = layer_spans(num_layers, mesh.pp * per_process)
        indices = stage_indices(
            size=mesh.pp, place=self.place, per_process=per_process, is_v_shaped=schedule == "zero-bubble"
        )
        return [_stage(parts, spans[index], index == 0, index == len(spans) - 1) for index in indices]

    def _shard(self, part: ModelPart) -> int:
        """Parameters of one piece of a part that this process holds."""
        mesh, whole = self.policy.mesh, num_whole(part, self.policy.mesh.tp)
        split = part.num_parameters - part.num_expert_parameters - whole
        dense = (split / mesh.tp + whole) / self.shards
        experts = part.num_expert_parameters / (mesh.ep * expert_shards(mesh) if mesh.ep > 1 else self.shards)
        return math.ceil(dense + experts)

    def _whole(self, part: ModelPart) -> int:
        """Parameters of one piece of a part that are together while it computes."""
        mesh, whole = self.policy.mesh, num_whole(part, self.policy.mesh.tp)
        split = part.num_parameters - part.num_expert_parameters - whole
        return math.ceil(split / mesh.tp + whole + part.num_expert_parameters / mesh.ep)

    def _tied(self, parts: Sequence[ModelPart]) -> int:
        """The last stage's copy of what it shares with the first."""
        names = {part.name for part in parts}
        whole = self.facts.parts
        is_copy = bool(whole) and whole[-1].name in names and whole[0].name not in names
        return math.ceil(self.facts.num_tied_parameters / self.policy.mesh.tp / self.shards) if is_copy else 0

    def _adapted(self, part: ModelPart) -> list[int]:
        """Inputs and outputs together of each linear layer that has an adapter."""
        modules = set() if self.policy.lora is None else set(self.policy.lora.modules)
        return [width for name, width in part.widths.items() if {name, "all-linear"} & modules]

    def _adapters(self, part: ModelPart) -> int:
        assert self.policy.lora is not None
        return math.ceil(self.policy.lora.rank * sum(self._adapted(part)) / self.shards)

    def _merged(self, parts: Sequence[ModelPart]) -> int:
        """The largest weight with its adapter added, and what is gathered of all adapters for such sums; at most."""
        if self.policy.lora is None:
            return 0
        # Sizes are not told: a layer of these widths has most weights if it is square.
        square = [(max(self._adapted(part), default=0) ** 2 / 4 / self.shards, self._shard(part)) for part in parts]
        gathered = self.shards * sum(part.count * self._adapters(part) for part in parts)
        return 4 * math.ceil(max(map(min, square), default=0) + (gathered if world_size(self.policy.mesh) > 1 else 0))

    def _gathered(self, parts: Sequence[ModelPart]) -> int:
        """Bytes gathered: two layers (the next comes while one computes) and what is round them; or casts."""
        is_alone = world_size(self.policy.mesh) == 1
        if is_alone and self.policy.precision == "fp32":
            return 0
        if is_alone and (self.policy.lora is None or self.policy.parallel.recompute == "none"):
            # Autocast caches what it casts of weights that are trained, and others' casts are kept for gradients.
            return 2 * self.facts.num_parameters
        layers = [self._whole(part) for part in parts if part.is_layer for _ in range(part.count)]
        rest = [*(self._whole(part) for part in parts if not part.is_layer), self.shards * self._tied(parts)]
        return self.item * (sum(rest) + (sum(sorted(layers)[-2:]) if is_alone or self._is_freed else sum(layers)))

    @property
    def _is_freed(self) -> bool:
        """True if FSDP frees what it has gathered, and in a pipeline whole gradients, in each pass."""
        choice = self.policy.parallel.reshard_after_forward
        return {"always": True, "never": False, "auto": self.policy.mesh.pp == 1}[choice]

    def _accumulated(self, parts: Sequence[ModelPart]) -> int:
        """Float32 gradients that the stages of a pipeline keep whole until the last micro-batch is through."""
        if self.policy.mesh.pp == 1 or self._is_freed:
            return 0
        if self.policy.lora is not None:
            return 4 * self.shards * sum(part.count * self._adapters(part) for part in parts)
        return 4 * (self.shards * self._tied(parts) + sum(part.count * self._whole(part) for part in parts))

    def _communication(self, parts: Sequence[ModelPart]) -> int:
        """The gradient of the largest piece before and while it is reduced in float32, and what neighbours exchange."""
        mesh = self.policy.mesh
        largest = max((self._whole(part) for part in parts), default=0)
        reduced = (self.item + 4) * largest if self.shards * mesh.dp_replicate > 1 and self.policy.lora is None else 0
        neighbours = 2 * (mesh.tp > 1) + 2 * (mesh.pp > 1) + 2 * (mesh.cp > 1)
        rows = math.ceil(self.units * self.facts.rows_per_unit)
        return reduced + neighbours * rows * self.facts.hidden_size * self.item

    def _logits(self, parts: Sequence[ModelPart]) -> int:
        """Bytes of logits, and of sums of gradients, where the output layer is, as if every unit were a decision."""
        if not self._has_output(parts):
            return 0
        # Chunks are of this process's part of the vocabulary.
        row = math.ceil(self.facts.vocab_size / self.policy.mesh.tp)
        values = math.ceil(self.units * row)
        most = max(self.facts.most_outputs or values, row)
        # Chunks add their gradients of the output layer up in float32; where gradients are reduced later, in the same
        # room, that counts it (`_communication`).
        is_summed = values > most and self.policy.lora is None and self.shards * self.policy.mesh.dp_replicate == 1
        summed = (4 + self.item) * row * self.facts.hidden_size if is_summed else 0
        return OUTPUT_COPIES * 4 * min(values, most) + summed

    def _has_output(self, parts: Sequence[ModelPart]) -> bool:
        return not self.facts.parts or self.facts.parts[-1].name in {part.name for part in parts}

    @property
    def _offloads(self) -> bool:
        return self.policy.parallel.offload_activations and self.policy.device != "cpu"

    def _activations(self, stages: Sequence[Sequence[ModelPart]], *, waits: bool) -> int:
        """Bytes of activations: of all micro-batches in flight, and of the layer that is computed again.

        Those of layers may wait in the machine's memory; of three layers, or fewer, they are on the device then.
        """
        parts = [[part for part in stage if not self._offloads or part.is_layer == waits] for stage in stages]
        kept = [sum(part.count * self._kept(part) for part in stage) for stage in parts]
        found = self._in_flight() * sum(kept) / len(kept)
        layers = [part for stage in stages for part in stage if part.is_layer and self.compute in part.kept]
        if self._offloads and not waits:
            every = self._in_flight() * sum(part.count * self._kept(part) for part in layers) / len(stages)
            found += min(every, 3 * max(map(self._kept, layers), default=0.0))
        if self.policy.parallel.recompute != "none" and not waits:
            found += max(map(self._all, layers), default=0.0)
        # What layers save takes whole blocks, each time that one goes forward.
        times = self._in_flight() * sum(part.count for stage in parts for part in stage) / len(parts) if waits else 0
        return math.ceil(self.units * found + times * BLOCK_BYTES)

    def _kept(self, part: ModelPart) -> float:
        """Bytes per unit that one piece of a part keeps."""
        kept = part.kept.get(self.compute)
        if kept is None:
            return 0.0
        recompute = self.policy.parallel.recompute if part.is_layer else "none"
        if recompute == "none":
            return self._all(part)
        entry = kept.entry / self._sequence_parts(part)
        if recompute == "full":
            return entry
        whole = kept.whole_products + (kept.routed_products if self.policy.mesh.ep == 1 else 0.0)
        products = (kept.products - whole) / self.policy.mesh.tp + whole
        # What is compiled ends round attention, so that what it takes, and the layer after it, is kept, too.
        choice, is_on_gpu = self.policy.parallel.compile, self.policy.device != "cpu"
        is_compiled = {"on": True, "off": False, "auto": is_on_gpu}[choice]
        return entry + products + (entry + self._heads(part) if is_compiled else 0.0)

    def _all(self, part: ModelPart) -> float:
        mesh, kept = self.policy.mesh, part.kept[self.compute]
        routed = kept.routed / (mesh.tp if mesh.ep > 1 else 1)
        stream = kept.stream / self._sequence_parts(part)
        return stream + kept.inputs + kept.inner / mesh.tp + self._heads(part) + routed

    def _heads(self, part: ModelPart) -> float:
        return part.kept[self.compute].heads / min([self.policy.mesh.tp, *part.head_parameters])

    def _sequence_parts(self, part: ModelPart) -> int:
        """Parts that the sequence is in; before the first layer and after the last one it is whole."""
        return self.policy.mesh.tp if self.policy.parallel.sequence_parallel and part.is_layer else 1

    def _in_flight(self) -> int:
        """Forwards of one stage whose backward passes are still to come, at most."""
        pp = self.policy.mesh.pp
        match self.policy.parallel.schedule:
            case _ if pp == 1:
                return 1
            case "1f1b":
                return pp - self.place
            case "interleaved":
                return pp + 2 * (pp - 1 - self.place) + 1
            case "zero-bubble":
                return 2 * pp


def _stage(parts: Sequence[ModelPart], span: range, is_first: bool, is_last: bool) -> list[ModelPart]:
    """The parts of one stage: its layers, and what comes before the first or after the last."""
    found: list[ModelPart] = []
    start = 0
    for part in parts:
        if part.is_layer:
            count = len(range(max(start, span.start), min(start + part.count, span.stop)))
            start += part.count
            found += [attrs.evolve(part, count=count)] if count else []
        elif is_first if start == 0 else is_last:
            found.append(part)
    return found


IN_FLIGHT_COPIES: Final = 4
"""Float32 values for each value of latents in flight: the state, velocities with and without the prompt, noise."""


def longest_sample(recipe: Recipe, context_length: int, longest_prompt: int) -> int:
    """Most units of a sample that is trained on; those of an environment's observations are bounded by nothing else."""
    if recipe.has_dialogues:
        return min(context_length, recipe.policy.micro_batch_units)
    return min(context_length, longest_prompt + recipe.rollout.sampling.max_units)


def cache_bytes(
    recipe: Recipe, facts: ModelFacts, longest_prompt: int, engine: EngineCapabilities, in_flight: int
) -> int:
    """Bytes of the KV cache that so many sequences take in each process, all at their longest."""
    item_size, tp, page = ITEM_SIZES[recipe.rollout.precision], recipe.rollout.mesh.tp, engine.cache_page
    # Each has all of what is compressed; else its heads, or one that several processes have if heads are too few.
    values, share = facts.compressed_cache_size if engine.compresses_cache else 0, 1.0
    if not values:
        values = facts.cache_size or 2 * facts.num_layers * facts.hidden_size
        share = max(1 / tp, *(1 / heads for part in facts.parts for heads in part.head_parameters), 0.0)
    units = longest_sample(recipe, facts.context_length, longest_prompt)
    # In pages, whole ones, and one that no sequence has.
    is_paged = recipe.rollout.device != "cpu" and page > 1
    units = in_flight * (units + -units % page) + page if is_paged else in_flight * units
    return math.ceil(values * share) * item_size * units


def rollout_memory(
    recipe: Recipe, facts: ModelFacts, longest_prompt: int, engine: EngineCapabilities, told: Preflight | None = None
) -> dict[str, int]:
    """Bytes of each process of one rollout replica by part; `told` is what its engine says of the run.

    The cache is an upper bound: every sequence in flight at its longest, or what the engine has at most. One that
    computes with codes, rather than with what they stand for, needs less for parameters. Of one that denoises, latents
    in flight are counted; its text encoder, its autoencoder and what is inside a forward are not.
    """
    item_size, tp = ITEM_SIZES[recipe.rollout.precision], recipe.rollout.mesh.tp
    if facts.latent_size:
        latents = IN_FLIGHT_COPIES * 4 * facts.latent_size * recipe.rollout.max_in_flight
        return {"parameters": item_size * facts.num_parameters, "latents in flight": latents}
    is_gpu, in_flight, told = recipe.rollout.device != "cpu", recipe.rollout.max_in_flight, told or Preflight()
    cache = cache_bytes(recipe, facts, longest_prompt, engine, in_flight)
    cache = min(cache, told.cache_bytes or cache)
    kept = math.ceil(told.kept_share * cache)
    logits = 2 * 4 * in_flight * facts.vocab_size
    codes = quantised_bytes(recipe, facts)
    split = sum(part.count * (part.num_parameters - num_whole(part, tp)) for part in facts.parts)
    return {
        "parameters": item_size * (facts.num_parameters - split + math.ceil(split / tp)),
        **({CODES: codes} if codes else {}),
        CACHE: cache,
        **({"prefix cache (at most)": kept} if kept and recipe.has_dialogues else {}),
        "logits (estimate)": logits,
        **({"decode graphs (estimate)": logits} if is_gpu and engine.replays_steps else {}),
    }


def between_gpus(recipe: Recipe, answers: int) -> dict[str, int]:
    """Bytes of so many answers of weights in a GPU's memory, where they go from one to another."""
    return {"weights on their way": answers * REQUEST_BYTES} if recipe.sync.transport == "nccl" else {}
