"""Fixtures of the model kit, tests of `build` and `facts`, and evaluations to compare with.

Shape legend: U units of a sequence, N decisions of it, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM

from cosmos_core.errors import CosmosError, DataError
from cosmos_core.models.tokens import KIND, values
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import Decided, Kind, MicroBatch, Model, ModelContext, ModelFacts
from cosmos_core.protocols.model import PipelinedModel
from cosmos_core.protocols.world import Noising
from cosmos_core.testing.conformance.plugin import PluginConformance, fault
from cosmos_core.types import JSON, Payload, Prompt
from cosmos_core.weights.shards import canonical_tensors


def decisions(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float) -> list[Decided]:
    """Export the model, load it back with transformers in float32, and evaluate each payload by itself."""
    with tempfile.TemporaryDirectory() as folder:
        model.export(module, Path(folder))
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [_decide(theirs, payload, temperature) for payload in payloads]


def _decide(theirs: Any, payload: Payload, temperature: float) -> Decided:
    prompt, completion = (torch.tensor(values(payload, name).tolist()) for name in ("prompt", "completion"))
    logits_UV = theirs(input_ids=torch.cat([prompt, completion]).long()[None], use_cache=False).logits[0]
    # The last unit predicts nothing; the first decision is taken at the last unit of the prompt.
    logits_NV = logits_UV[len(prompt) - 1 : -1].float() / temperature
    logprobs_NV = logits_NV.log_softmax(-1)
    return Decided(
        logprobs_N=logprobs_NV.gather(1, completion.long()[:, None])[:, 0],
        entropy_N=-(logprobs_NV.exp() * logprobs_NV).nan_to_num(0.0).sum(-1),
    )


ROOM: Final = 1 << 16
"""A budget that takes all payloads of a test at once."""


def decide_each(
    model: Model,
    module: torch.nn.Module,
    payloads: Sequence[Payload],
    *,
    budget: int = ROOM,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> list[Decided]:
    """Pack payloads, evaluate them, and give each its decisions, in the order of `payloads`."""
    found: dict[int, list[Decided]] = {}
    for batch in model.pack(payloads, budget=budget):
        decided = model.decide(module, batch, temperature=temperature, with_entropy=with_entropy)
        for index, piece in split(batch, decided).items():
            found.setdefault(index, []).append(piece)
    if sorted(found) != list(range(len(payloads))):
        fault(f"pack() was given {len(payloads)} payloads and packed those numbered {sorted(found)}")
    return [_joined(found[index]) for index in range(len(payloads))]


def _joined(parts: Sequence[Decided]) -> Decided:
    """A sequence's decisions from those of its pieces, in order."""
    if len(parts) == 1:
        return parts[0]
    entropies = [each.entropy_N for each in parts if each.entropy_N is not None]
    return Decided(
        logprobs_N=torch.cat([each.logprobs_N for each in parts]), entropy_N=torch.cat(entropies) if entropies else None
    )


def split(batch: MicroBatch, decided: Decided) -> dict[int, Decided]:
    """Split what was decided in a micro-batch by number of the payload; of one that is split, what is here."""
    total = sum(batch.num_decisions)
    if tuple(decided.logprobs_N.shape) != (total,):
        fault(
            f"decide() gave log-probs of shape {tuple(decided.logprobs_N.shape)} for {total} decisions "
            "(the sum of MicroBatch.num_decisions)"
        )
    sizes = list(batch.num_decisions)
    logprobs = torch.split(decided.logprobs_N, sizes)
    entropies = [None] * len(sizes) if decided.entropy_N is None else torch.split(decided.entropy_N, sizes)
    return {
        index: Decided(logprobs_N=logprobs_N, entropy_N=entropy_N)
        for index, logprobs_N, entropy_N in zip(batch.sequences, logprobs, entropies, strict=True)
    }


def demonstrations(model: Model, prompts: Sequence[Prompt]) -> list[Payload]:
    """The rows that have one, as a policy trains on them: with drawn points, of a model that needs these."""
    shown = [model.encode_demonstration(prompt) for prompt in prompts if prompt.demonstration is not None]
    if not isinstance(model, Noising):
        return shown
    return [model.noised(payload, index) for index, payload in enumerate(shown)]


def splits(model: Model, payload: Payload) -> bool:
    """True if the model splits sequences over micro-batches."""
    size = pack_alone(model, payload).num_units
    if size < 2:
        return False
    try:
        return len(model.pack([payload], budget=size - 1)) > 1
    except DataError:
        return False


def pack_alone(model: Model, payload: Payload) -> MicroBatch:
    """A payload in a micro-batch of its own."""
    try:
        batches = model.pack([payload], budget=ROOM)
    except DataError as error:
        fault(f"pack() refuses a payload of the kit under a budget of {ROOM} units: {error}")
    if [tuple(batch.sequences) for batch in batches] != [(0,)]:
        fault(f"pack() of one payload gave {len(batches)} micro-batches; give one, whose sequences are (0,)")
    return batches[0]


def total_logprob(
    model: Model, module: torch.nn.Module, batches: Sequence[MicroBatch], *, temperature: float = 1.0
) -> float:
    """The log-probability of everything that was decided, summed in float64."""
    with torch.no_grad():
        parts = [model.decide(module, batch, temperature=temperature).logprobs_N.double().sum() for batch in batches]
    return float(sum(parts))


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the tensors that travel."""
    return {name: tensor.clone() for name, tensor in canonical_tensors(module).items()}


def disturb(module: torch.nn.Module) -> None:
    """Change every element that travels a little, as training would: a zero too, and no sign."""
    generator = torch.Generator().manual_seed(0)
    for tensor in canonical_tensors(module).values():
        if tensor.is_floating_point():
            drawn = 0.1 * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(torch.where(tensor == 0, drawn.abs(), tensor * (1 + drawn)))


def first_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor, by name, that is not the same bit for bit in both; None if all are."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            return f"{name} (only one of the two has it)"
        if not torch.equal(one[name], other[name]):
            return name
    return None


_ERROR: Final = 1e-4
"""Largest difference of a log-prob between processes."""


class BrokenPromiseError(CosmosError):
    """A module that is spread over processes does not do what every other part relies on."""


def inspect(model: Model, module: torch.nn.Module, batches: Sequence[MicroBatch], world: World) -> None:
    """Look at a module on every process of a world, all of which have these micro-batches.

    Raises:
        BrokenPromiseError: Processes say different things, or a stage gives what cannot be passed on.
    """
    if world.mesh.size("pp") > 1:
        _inspect_stages(cast("PipelinedModel", model), module, batches, world)
    else:
        _inspect_decisions(model, module, batches, world)


def _inspect_decisions(model: Model, module: torch.nn.Module, batches: Sequence[MicroBatch], world: World) -> None:
    for batch in batches:
        with torch.no_grad():
            logprobs_N = model.decide(module, batch, temperature=1.0).logprobs_N
        total = sum(batch.num_decisions)
        if tuple(logprobs_N.shape) != (total,):
            raise BrokenPromiseError(
                f"decide() gave log-probs of shape {tuple(logprobs_N.shape)} for {total} decisions on rank "
                f"{world.rank}; every process that shares the sequences returns all of their decisions"
            )
        for rank, data in enumerate(world.exchange(logprobs_N.numpy().tobytes())):
            other_N = torch.frombuffer(bytearray(data), dtype=logprobs_N.dtype)
            if not torch.allclose(other_N, logprobs_N, rtol=_ERROR, atol=_ERROR):
                raise BrokenPromiseError(
                    f"decide() gives other log-probs on rank {rank} than on rank {world.rank} for the same "
                    f"micro-batch, by {float((other_N - logprobs_N).abs().max()):.3g}"
                )


def _inspect_stages(
    model: PipelinedModel, module: torch.nn.Module, batches: Sequence[MicroBatch], world: World
) -> None:
    stages = model.stages(module)
    if not stages:
        raise BrokenPromiseError(f"stages() gave none on rank {world.rank}")
    if world.mesh.place("pp") == 0 and model.advance(stages[0], batches[0], None)._is_view():  # noqa: SLF001
        raise BrokenPromiseError("advance() gave a view: what is passed on is detached in place; give a clone")


CPU: Final = torch.device("cpu")
SEED: Final = 0

Reload: TypeAlias = Callable[[Path], Model]


class ModelSetting(PluginConformance):
    """The class variables, fixtures and methods that `ModelConformance` documents."""

    kind: ClassVar[Kind] = "model"
    config: ClassVar[Mapping[str, JSON] | None] = None
    path: ClassVar[str | None] = None
    tokenizer: ClassVar[Mapping[str, JSON] | None] = {
        "build": "byte-bpe",
        "vocab_size": 300,
        "split_digits": True,
        "corpus_rows": 100,
    }
    temperatures: ClassVar[Sequence[float]] = (1.0, 0.6, 1.7)
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture
    def prompts(self) -> Sequence[Prompt]:
        """Rows of different lengths, each with a demonstration."""
        rows = [
            ("Ann has 3 apples and buys 4 more. How many?", "3+4=7\n#### 7"),
            ("2+2=", "4"),
            ("Zoë zählt: 12, 13,", "14 😀"),
            ("How many?", "Twenty-one"),
            ("a", ""),
            ("One, two, three, four, five, six,", "seven, eight, nine, ten, eleven"),
        ]
        return tuple(Prompt(text=text, demonstration=answer) for text, answer in rows)

    @pytest.fixture
    def corpus(self, prompts: Sequence[Prompt]) -> Sequence[str]:
        """The texts that a tokenizer is trained on."""
        return tuple(f"{prompt.text}{prompt.demonstration or ''}" for prompt in prompts)

    @pytest.fixture
    def context(self, tmp_path: Path) -> ModelContext:
        """A model's context: `path` or `config`, and an empty folder for what is made locally."""
        if (self.config is None) == (self.path is None):
            fault(
                f"{type(self).__name__} names no model, or two: set config, a Hugging Face config of a few layers such "
                "as {'model_type': 'qwen3', 'hidden_size': 32, ...}, or path, the folder of a small checkpoint"
            )
        return ModelContext(path=self.path, config=self.config, assets=tmp_path / "assets")

    @pytest.fixture
    def model(self, make: Callable[..., Any], context: ModelContext, corpus: Sequence[str]) -> Model:
        """The plugin's model, as a replica makes it once planning has made the tokenizer."""
        planned: Model = make()
        if context.config is not None and self.tokenizer is not None:
            planned.prepare(corpus, self.tokenizer)
        replica: Model = make()
        return replica

    @pytest.fixture
    def module(self, model: Model) -> torch.nn.Module:
        """Its weights, as a trainer has them."""
        return model.build(seed=SEED, dtype=torch.float32, device=CPU)

    @pytest.fixture
    def payloads(self, model: Model, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """Payloads to evaluate: the demonstrations, encoded, and noised where the model learns them at drawn points."""
        shown = demonstrations(model, prompts)
        if len(shown) < 2:
            fault("the kit needs two payloads at least: give `prompts` demonstrations, or override `payloads`")
        return shown

    @pytest.fixture
    def reload(self, plugins: PluginSet, options: Mapping[str, JSON], tmp_path: Path) -> Reload:
        """Make the plugin's model from a folder that was exported."""

        def load(directory: Path) -> Model:
            context = ModelContext(path=str(directory), config=None, assets=tmp_path / "nothing-made-locally")
            model: Model = plugins.create(self.kind, self.plugin, options, context)
            return model

        return load

    def reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, temperature: float
    ) -> list[Decided]:
        """Decisions of each payload, by other means than `decide` of a packed row."""
        if foreign := {payload.kind for payload in payloads} - {KIND}:
            fault(
                f"the kit has no reference for payloads of kind {', '.join(sorted(foreign))}; "
                "override ModelConformance.reference"
            )
        return decisions(model, module, payloads, temperature)

    def load_exported(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """The tensors of an exported folder by canonical name, as the family's public library reads them."""
        loaded, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        # What the files lack, transformers draws.
        return {name: tensor for name, tensor in loaded.state_dict().items() if name not in report["missing_keys"]}


class ModelBuilding(ModelSetting):
    """Tests of `build` and `facts`."""

    def test_one_seed_gives_the_same_weights_bit_for_bit(self, model: Model, make: Callable[..., Any]) -> None:
        """Every replica starts from the seed, and each must start from the same weights."""
        states = []
        for disturbance, builder in ((1, model), (2, model), (3, make())):
            torch.manual_seed(disturbance)
            states.append(copied(builder.build(seed=SEED, dtype=torch.float32, device=CPU)))
        for other in states[1:]:
            if name := first_difference(states[0], other):
                fault(f"build(seed={SEED}) gives other weights the second time: {name}; draw from `seed` alone")

    def test_another_seed_gives_other_weights(
        self, model: Model, module: torch.nn.Module, context: ModelContext
    ) -> None:
        """A run from random weights is repeated with another seed to tell luck from progress."""
        if context.path is not None:
            pytest.skip("not random: the weights are those of a checkpoint")
        other = model.build(seed=SEED + 1, dtype=torch.float32, device=CPU)
        if first_difference(copied(module), copied(other)) is None:
            fault(f"build(seed={SEED}) and build(seed={SEED + 1}) give the same weights; draw them from `seed`")

    def test_building_leaves_the_random_state_alone(self, model: Model) -> None:
        """Whoever draws after it would draw something else."""
        torch.manual_seed(5)
        before = torch.get_rng_state()
        model.build(seed=SEED, dtype=torch.float32, device=CPU)
        if not torch.equal(torch.get_rng_state(), before):
            fault("build() changes torch's global random state; draw under torch.random.fork_rng()")

    def test_two_modules_share_no_memory(self, model: Model, module: torch.nn.Module) -> None:
        """A trainer and an engine of one process each have their own."""
        other = model.build(seed=SEED, dtype=torch.float32, device=CPU)
        held = {tensor.data_ptr(): name for name, tensor in canonical_tensors(module).items()}
        shared = [held[t.data_ptr()] for t in canonical_tensors(other).values() if t.numel() and t.data_ptr() in held]
        if other is module or shared:
            fault(f"build() gave weights that an earlier module holds: {', '.join(shared[:3])}; make new ones")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_the_dtype_is_honoured(self, model: Model, dtype: torch.dtype) -> None:
        """Trainers ask for float32, rollout replicas for what they serve in."""
        module = model.build(seed=SEED, dtype=dtype, device=CPU)
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                fault(f"build(dtype={dtype}) made {name} as {parameter.dtype}; cast the whole module")
            if parameter.device != CPU:
                fault(f"build(device=cpu) left {name} on {parameter.device}")

    def test_facts_are_found_without_building(self, model: Model) -> None:
        """Planning must be quick, on a machine that could not hold the weights."""
        allocated: list[str] = []

        def note(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
            # A FakeTensor names a device, and has no storage there.
            if parameter is not None and parameter.device.type != "meta" and not isinstance(parameter, FakeTensor):
                allocated.append(f"{type(module).__name__}.{name}")

        handle = register_module_parameter_registration_hook(note)
        try:
            model.facts()
        finally:
            handle.remove()
        if allocated:
            fault(f"facts() allocates weights ({allocated[0]} first); count them on the meta device, or by arithmetic")

    def test_facts_agree_with_the_module(self, model: Model, module: torch.nn.Module) -> None:
        """Planning reports sizes and memory from them."""
        counted = sum(parameter.numel() for parameter in module.parameters())
        stated = model.facts().num_parameters
        if stated != counted:
            fault(
                f"facts().num_parameters is {stated:,}, the module has {counted:,} (tied parameters counted once); "
                "count what build() makes"
            )

    def test_matrices_are_weights_of_the_module(self, model: Model, module: torch.nn.Module) -> None:
        """Both sides of a publication go by them: what is quantised here must be what is expected there."""
        tensors = canonical_tensors(module)
        for name, shape in model.facts().matrices.items():
            tensor = tensors.get(name)
            if tensor is None or tuple(tensor.shape) != tuple(shape) or tensor.ndim < 2:
                found = "no such tensor" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
                fault(
                    f"facts().matrices gives {name!r} as {tuple(shape)}, and the module has {found}; name weights of "
                    "[..., rows, columns] by their canonical names"
                )

    def test_every_token_id_has_a_row_in_the_embedding(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Engines and planning take the sizes from the facts; an id beyond them reads past the end of a table."""
        tokens = [payload for payload in payloads if payload.kind == KIND]
        if not tokens:
            pytest.skip(f"not given: none of the kit's payloads is of kind {KIND!r}")
        facts = model.facts()
        arrays = [values(payload, name) for payload in tokens for name in ("prompt", "completion")]
        largest = max(int(ids.max(initial=-1)) for ids in arrays)
        if largest >= facts.tokenizer_size:
            fault(
                f"a demonstration is encoded to token id {largest}, and facts().tokenizer_size is "
                f"{facts.tokenizer_size}; give the largest id of the tokenizer plus one"
            )
        find = getattr(module, "get_input_embeddings", None)
        if find is None:
            pytest.skip("unknown: the module has no get_input_embeddings(), so the kit cannot count the rows")
        rows = find().weight.shape[0]
        if facts.vocab_size != rows:
            fault(f"facts().vocab_size is {facts.vocab_size}, and the embedding has {rows} rows; give those of build()")

    def test_facts_hold_together(self, model: Model, make: Callable[..., Any]) -> None:
        """Planning refuses recipes by them, in a process of its own."""
        facts: ModelFacts = model.facts()
        if facts != make().facts() or facts != model.facts():
            fault(f"facts() differ between two instances or two calls: {facts}")
        if not facts.architecture or facts.context_length < 1:
            fault(f"facts() name no architecture or no context: {facts}; context_length counts the prompt too")
        if facts.tokenizer_size > facts.vocab_size:
            fault(
                f"facts().tokenizer_size is {facts.tokenizer_size}, facts().vocab_size {facts.vocab_size}: "
                "token ids would have no row in the embedding"
            )
        if not facts.tokenizer_size:
            return
        if not facts.stop_ids:
            fault("facts().stop_ids is empty: no completion would ever end before the longest length")
        foreign = sorted(i for i in {*facts.stop_ids, facts.pad_id} if not 0 <= i < facts.tokenizer_size)
        if foreign:
            fault(f"facts() name stop or pad ids {foreign} outside the tokenizer's {facts.tokenizer_size} ids")
