"""The kits for models: what a test class sets and overrides, with the tests of its parts.

Shape legend: N decisions of a payload, C channels, T latent frames, H and W latent height and width, L tokens of the
text, E their width.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from cosmos_core.config.schema import LoraConfig, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.errors import DataError
from cosmos_core.models.diffusion import TEXT, DiffusionModel, DiffusionOptions
from cosmos_core.models.parallel.lora import is_adapter
from cosmos_core.models.tokens import KIND, values
from cosmos_core.protocols import Decided, Kind, Model, ModelCapabilities, ModelContext
from cosmos_core.protocols.layout import Axis
from cosmos_core.testing.conformance.model.decisions import DecisionTests
from cosmos_core.testing.conformance.model.denoising import DenoisingTests, scored, walked
from cosmos_core.testing.conformance.model.rows import PackingTests, RowTests, demonstrations
from cosmos_core.testing.conformance.model.subject import Subject, expect_refusal, first_difference, tensor_of
from cosmos_core.testing.conformance.model.weights import WeightTests
from cosmos_core.testing.conformance.plugin import PluginConformance, fault
from cosmos_core.testing.layouts import PluginModel, step_alone, steps_in_layouts, worst_error
from cosmos_core.types import JSON, Payload, Prompt

_ROWS = (
    ("Ann has 3 apples and buys 4 more. How many?", "3+4=7\n#### 7"),
    ("2+2=", "4"),
    ("Zoë zählt: 12, 13,", "14 😀"),
    ("How many?", "Twenty-one"),
    ("a", ""),
    ("One, two, three, four, five, six,", "seven, eight, nine, ten, eleven"),
)
_KEPT: Final = 0.15
"""Largest error of what facts say that a decision keeps: what the loss keeps is not in them."""


_LAYOUTS: Final[Sequence[tuple[MeshConfig, Mapping[str, Any]]]] = (
    (MeshConfig(dp_shard=4), {}),
    (MeshConfig(dp_replicate=2, dp_shard=2), {"parallel": ParallelConfig(recompute="selective")}),
    (MeshConfig(dp_shard=2, cp=2), {}),
    (MeshConfig(dp_replicate=2, cp=2), {"parallel": ParallelConfig(recompute="full")}),
    (MeshConfig(dp_shard=2, cp=2), {"lora": LoraConfig(rank=2, alpha=4.0)}),
)


class ModelSpreading:
    """Training steps on four processes, along several axes, compared as closely as floats allow."""

    def test_axes_together_equal_one_process(self, subject: Subject) -> None:
        """Sums over processes are those of one process: to 1e-6 in float64, in float32 but for its rounding.

        In float32 a gradient that is what is left of larger terms, such as that of the bias of keys, is rounded to some
        1e-6 of its norm in any layout. In float64 what is left are parts that a transformer computes in float32.
        """
        possible = _possible(subject)
        policies = [_policy(subject, mesh, **others) for mesh, others in _LAYOUTS if set(_sizes(mesh)) <= possible]
        if not policies:
            pytest.skip("not declared: neither dp_shard nor two axes that this model can be spread over")
        # In float64 all of them; float32 is the same arithmetic, rounded, so one of them tells.
        layouts = [*((policy, torch.float64) for policy in policies), (policies[0], torch.float32)]
        _check_steps(subject, layouts, 4, loss=1e-6, gradients={torch.float64: 1e-6, torch.float32: 5e-6})


class ModelConformance(WeightTests, RowTests, PackingTests, DecisionTests, DenoisingTests, PluginConformance):
    """Tests that every model must pass, on a tiny one of its family.

    A language model needs `plugin` and `config` (or `path`):

        class TestLlama(ModelConformance):
            plugin = "llama"
            config = TINY

    A model of another kind of payload overrides `payloads`, `reference` and `load_exported` as well.

    Attributes:
        config: A Hugging Face config, as `[model.config]` of a recipe, for random weights. Take a few layers of width
            16 to 64 and a large `initializer_range` (0.2), so that mistakes show.
        path: A folder with a small checkpoint, instead of `config`.
        tokenizer: What `prepare` is asked to make, as `[model.tokenizer]` of a recipe; None asks for nothing.
        temperatures: At which log-probs and entropies are compared with the reference. Gradients are tested at the
            first that is not 1.
        tolerance: Largest difference of a log-prob or entropy in float32: absolute, and relative to its size.

    Fixtures to override:
        options: The plugin's options, as a recipe gives them.
        context: The `ModelContext`.
        prompts: Rows, of different lengths, with demonstrations.
        corpus: Texts that the tokenizer is trained on; those of `prompts`.
        payloads: What is packed and evaluated; the demonstrations of `prompts`, noised where the model is a
            `WorldModel`. At least two, of different lengths, and one at least of each payload kind that is declared.
        steering: Texts of the tokens that end or begin turns or stand for something else than text, with their ids;
            those of a Hugging Face `tokenizer` of the model, or none.

    Methods to override:
        reference(model, module, payloads, *, temperature): What each payload's decisions are, by other means; one
            `Decided` a payload, its entropy None where there is none to compare. The default exports the module,
            loads it with `transformers.AutoModelForCausalLM` in float32 and runs each sequence alone.
        load_exported(directory): The tensors of an exported folder by canonical name, as the family's public library
            reads them. The default is `AutoModelForCausalLM.from_pretrained`.
    """

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
        return tuple(Prompt(text=text, demonstration=answer) for text, answer in _ROWS)

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
        if context.config is not None and self.tokenizer is not None:
            make().prepare(corpus, self.tokenizer)
        replica: Model = make()
        return replica

    @pytest.fixture
    def payloads(self, model: Model, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """Payloads to evaluate: the demonstrations, encoded, and noised where the model learns them at drawn points."""
        shown = demonstrations(model, prompts)
        if len(shown) < 2:
            fault("the kit needs two payloads at least: give `prompts` demonstrations, or override `payloads`")
        return shown

    @pytest.fixture
    def steering(self, model: Model) -> Mapping[str, int]:
        """Texts of tokens that end or begin turns, or stand for something else than text, with their ids."""
        tokenizer = getattr(model, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return {}
        # Of the ordinary vocabulary, what ends a completion is a word elsewhere, such as the end of a line.
        stops = model.facts().stop_ids & tokenizer.added_tokens_decoder.keys()
        ids = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} | stops
        return {str(tokenizer.convert_ids_to_tokens(id_)): id_ for id_ in sorted(ids)}

    @pytest.fixture
    def subject(  # noqa: PLR0917 - all that a test class may override
        self,
        options: Mapping[str, JSON],
        context: ModelContext,
        model: Model,
        capabilities: ModelCapabilities,
        prompts: Sequence[Prompt],
        payloads: Sequence[Payload],
    ) -> Subject:
        """The model, and what it is tested with."""
        maker = PluginModel(plugin=self.plugin, options=options, context=context)
        return Subject(
            kit=self, maker=maker, model=model, capabilities=capabilities, prompts=prompts, payloads=payloads
        )

    def test_declared_mesh_axes_equal_one_process(self, subject: Subject) -> None:
        """Weights, loss, gradients and counts in float32 are the same on two processes along each axis."""
        axes = [axis for axis in get_args(Axis) if axis in _possible(subject)]
        if not axes:
            pytest.skip("not declared: no axis that this model can be spread over")
        # Experts are spread over processes that another axis makes.
        meshes = [MeshConfig(**{axis: 2, **({"dp_shard": 2} if axis == "ep" else {})}) for axis in axes]
        # Of float32; faults are orders of magnitude larger.
        layouts = [(_policy(subject, mesh), torch.float32) for mesh in meshes]
        _check_steps(subject, layouts, 2, loss=1e-5, gradients={torch.float32: 1e-4})

    def reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, temperature: float
    ) -> list[Decided]:
        """Decisions of each payload, by other means than `decide` of a packed row."""
        if foreign := {payload.kind for payload in payloads} - {KIND}:
            fault(
                f"no reference for payloads of kind {', '.join(sorted(foreign))}; override ModelConformance.reference"
            )
        with tempfile.TemporaryDirectory() as folder:
            model.export(module, Path(folder), dtype=torch.float32)
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found = []
        for payload in payloads:
            prompt, completion = (torch.tensor(values(payload, name).tolist()) for name in ("prompt", "completion"))
            ids = torch.cat([prompt, completion]).long()
            with torch.no_grad():
                # The first decision is taken at the last unit of the prompt, and the last unit predicts nothing.
                logits_NV = theirs(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            logprobs_NV = (logits_NV.float() / temperature).log_softmax(-1)
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).nan_to_num(0.0).sum(-1)
            found.append(
                Decided(logprobs_N=logprobs_NV.gather(1, completion.long()[:, None])[:, 0], entropy_N=entropy_N)
            )
        return found

    def load_exported(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """The tensors of an exported folder by canonical name, as the family's public library reads them."""
        loaded, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        # What the files lack, transformers draws.
        return {name: tensor for name, tensor in loaded.state_dict().items() if name not in report["missing_keys"]}


# A norm of a transformer may keep float32 weights under autocast, which torch says once.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
class DenoisingModelConformance(ModelSpreading, ModelConformance):
    """Tests that every family of world models on `DiffusionModel` must pass, on a tiny one whose latents are pixels.

    It is `ModelConformance` with rows, payloads and a reference of its own, and compares layouts more closely. A family
    sets `plugin` and `config`, overrides the fixture `options`, and says what its library computes. Texts come from a
    table, so that the kit knows what the transformer is shown, and the negative prompt has words, so that it shows:

        class TestWan(DenoisingModelConformance):
            plugin = "wan"
            config = CONFIG

            @pytest.fixture
            def options(self):
                return {"num_frames": 4, ..., "text": "table", "text_length": 4, "negative_prompt": "grey"}

            def forward(self, module, latents, time, text):
                return module(hidden_states=latents, timestep=1000 * time, ...)[0]

            def guided(self, velocity, negative, guidance):
                return negative + guidance * (velocity - negative)

    Methods to override:
        forward(module, latents, time, text): The velocity [1, C, T, H, W] as the family's library calls the transformer
            for latents [1, C, T, H, W] of which no frame is given, a time [1] in [0, 1], 1 being noise, and a text
            [1, L, E].
        guided(velocity, negative, guidance): How its pipeline combines the velocities of the prompt and of the negative
            prompt.
    """

    tokenizer: ClassVar[Mapping[str, JSON] | None] = None
    temperatures: ClassVar[Sequence[float]] = (1.0,)

    def forward(self, module: Any, latents: Any, time: Any, text: Any) -> torch.Tensor:  # noqa: ARG002 - for overrides
        """The velocity by the family's library."""
        fault(f"{type(self).__name__} does not say what the family's library computes: override forward")

    def guided(self, velocity: Any, negative: Any, guidance: float) -> torch.Tensor:  # noqa: ARG002 - for overrides
        """The guided velocity by the family's library."""
        fault(f"{type(self).__name__} does not say how guidance combines two velocities: override guided")

    @pytest.fixture
    def prompts(self, make: Callable[..., Any], tmp_path: Path) -> Sequence[Prompt]:
        """Two captions with a video to imitate."""
        options = make().options
        film = _film(options, options.num_frames, tmp_path / "film.npy")
        return tuple(Prompt(text=words, demonstration=film) for words in ("red", "two words"))

    @pytest.fixture
    def payloads(self, model: DiffusionModel, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """Regressions and transitions under guidance, in turn."""
        made = []
        for index in range(5):
            prompt = prompts[index % len(prompts)]
            if index % 2 == 0:
                sample = model.encode_demonstration(prompt)
                made.append(model.noised(sample, index, num_decisions=1 + (index + 2) % 4))
            else:
                shown, guidance = model.encode(prompt), model.neutral_guidance + 1.5
                made.append(walked(shown, model.latent_spec(shown), number=2, guidance=guidance, seed=index))
        return made

    def test_a_demonstration_can_be_vetted(
        self, model: DiffusionModel, prompts: Sequence[Prompt], tmp_path: Path
    ) -> None:
        """Planning asks `vet` about some rows, so that a run does not find out later."""
        for prompt in prompts:
            try:
                model.vet(prompt)
            except DataError as error:
                fault(f"vet() refuses the row {prompt.text!r}, which can be encoded: {error}")
        unusable = {"no-such-film.mp4": "is no file"}
        if model.options.num_frames > 1:
            short = _film(model.options, model.options.num_frames - 1, tmp_path / "short.npy")
            unusable[short] = "is a frame too short"
        for film, what in unusable.items():
            row = attrs.evolve(prompts[0], demonstration=film)
            for method in (model.encode_demonstration, model.vet):
                expect_refusal(f"{method.__name__}() passes a row whose demonstration {what}", method, row)

    def test_facts_say_what_a_decision_keeps(self, subject: Subject) -> None:
        """Plans tell from it what a micro-batch takes."""
        model: Any = subject.model
        parts = model.facts().parts
        if not all("float32" in part.kept for part in parts):
            pytest.skip("not declared: the model's facts do not say what its parts keep")
        each = [(part.count, part.kept["float32"]) for part in parts]
        said = sum(count * (kept.stream + kept.inputs + kept.inner + kept.heads + kept.routed) for count, kept in each)
        demonstration = model.encode_demonstration(subject.prompts[0])
        few, many = (_kept(subject, model.noised(demonstration, 0, num_decisions=number)) for number in (2, 6))
        if abs(said / (found := (many - few) / 4) - 1) > _KEPT:
            fault(f"facts() say that a decision keeps {said:.0f} bytes for the backward pass, and it keeps {found:.0f}")

    @torch.no_grad()
    def reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, temperature: float
    ) -> list[Decided]:
        """The decisions of each payload by the velocities of the family's library, at temperature 1."""
        assert isinstance(model, DiffusionModel)
        assert temperature == 1.0
        options = model.options
        if options.text != "table" or options.negative_embedding is not None or not options.negative_prompt:
            fault(
                "the kit knows the texts of a table alone; give options text = 'table', a negative_prompt, such as "
                f"'grey', and no negative_embedding: they are {options.text!r}, {options.negative_prompt!r} and "
                f"{options.negative_embedding!r}"
            )
        return [self._decided(model, module, payload) for payload in payloads]

    def load_exported(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """The tensors of the exported transformer, as diffusers loads it."""
        from diffusers import AutoModel  # noqa: PLC0415 - it takes seconds, and transformers come first

        loaded: Any = AutoModel.from_pretrained(str(directory), subfolder="transformer")  # type: ignore[no-untyped-call]
        tensors: Mapping[str, torch.Tensor] = loaded.state_dict()
        return tensors

    def _decided(self, model: DiffusionModel, module: torch.nn.Module, payload: Payload) -> Decided:
        # Of payloads alone: a model that shows its transformer something else is to be found out.
        texts = _text(model, payload), _text(model, model.encode(Prompt(text=model.options.negative_prompt or "")))

        def velocity(states_N: torch.Tensor, times_N: torch.Tensor, guidance: float) -> torch.Tensor:
            each = range(len(times_N))
            found_N, negative_N = (
                torch.cat([self.forward(module, states_N[n, None], times_N[n, None], text) for n in each])
                for text in texts
            )
            return found_N if guidance == model.neutral_guidance else self.guided(found_N, negative_N, guidance)

        return scored(payload, model.latent_spec(payload), model.neutral_guidance, velocity)


def _text(model: DiffusionModel, payload: Payload) -> torch.Tensor:
    """The text that the transformer is to be shown [1, L, E]: a payload's text, filled up with zeros."""
    text_LE = tensor_of(payload, TEXT)
    return torch.nn.functional.pad(text_LE, (0, 0, 0, model.options.text_length - len(text_LE)))[None]


def _film(options: DiffusionOptions, num_frames: int, path: Path) -> str:
    """A video of the size that is generated; its file."""
    shape = num_frames, options.height, options.width, 3
    np.save(path, np.random.default_rng(0).integers(0, 255, shape, np.uint8))
    return str(path)


def _kept(subject: Subject, payload: Payload) -> int:
    """Bytes that autograd keeps of a micro-batch, besides parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in subject.module.parameters()}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Held, so that the address of one does not come again.
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        subject.decide(subject.pack_alone(payload))
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    return sum(size for place, size in sizes.items() if place not in own)


def _check_steps(
    subject: Subject,
    layouts: Sequence[tuple[PolicyConfig, torch.dtype]],
    processes: int,
    *,
    loss: float,
    gradients: Mapping[torch.dtype, float],
) -> None:
    """Compare a step in each layout with that of one process, relative to their size: the loss and each gradient."""
    names = [_name(policy) for policy, _ in layouts]
    policies, dtypes = zip(*layouts, strict=True)
    try:
        alone = {
            (lora, dtype): step_alone(subject.maker, subject.payloads, _policy(subject, lora=lora), dtype=dtype)
            for lora, dtype in {(policy.lora, dtype) for policy, dtype in layouts}
        }
        steps = steps_in_layouts(subject.maker, subject.payloads, policies, processes=processes, dtypes=dtypes)
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        fault(f"a step alone, or on {processes} processes {', '.join(names)}, failed:\n{error}")
    for where, (policy, dtype), found in zip(names, layouts, steps, strict=True):
        expected, gradient = alone[policy.lora, dtype], gradients[dtype]
        if name := first_difference(found.weights, expected.weights):
            fault(f"{where} build() makes other weights: {name}; they must not depend on the layout")
        trained = [] if policy.lora is None else [name for name in found.gradients if not is_adapter(name)]
        if trained:
            fault(f"{where} {trained[0]} has a gradient, and is no adapter; freeze what adapters are beside")
        for what in ("loss", *(found.metrics.keys() | expected.metrics.keys())):
            one, other = ({"loss": each.loss, **each.metrics}.get(what, math.nan) for each in (found, expected))
            if not abs(one - other) <= (loss if what == "loss" else gradient) * abs(other):
                fault(f"{where} in {dtype} the {what} is {one:.9g}, in one process {other:.9g}")
        name, apart = worst_error(found.gradients, expected.gradients)
        if not apart <= gradient:
            what = f"{where} in {dtype} the gradient of {name} differs from one process's by {apart:.3g} of its norm"
            fault(f"{what}; is it summed over processes exactly once?")


def _possible(subject: Subject) -> frozenset[Axis]:
    """The declared axes but for those of which planning refuses any recipe."""
    return subject.capabilities.mesh_axes - subject.facts.impossible.keys()


def _policy(subject: Subject, mesh: MeshConfig | None = None, **others: Any) -> PolicyConfig:
    # Two micro-batches at least: what is reduced twice shows at the second one only.
    budget = max(batch.num_units for batch in subject.alone)
    return PolicyConfig(precision="fp32", micro_batch_units=budget, mesh=mesh or MeshConfig(), **others)


def _name(policy: PolicyConfig) -> str:
    sizes = [f"{axis} = {size}" for axis, size in sorted(_sizes(policy.mesh).items())]
    return f"with {', '.join(sizes)}{'' if policy.lora is None else ', adapters'}"


def _sizes(mesh: MeshConfig) -> dict[str, int]:
    return {axis: size for axis, size in attrs.asdict(mesh).items() if size > 1}
