"""The protocol of model plugins: build, encode, pack, evaluate decisions, save.

Language and world models share this: a payload goes in, one log-probability per *decision* comes out.
A decision is a sampled token of a language model or a denoising step of a diffusion model.

Shape legend: N decisions of a micro-batch, S sequences of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from cosmos_core.protocols.facts import ModelFacts
from cosmos_core.protocols.frozen import Blended, Comparison, DivergenceKind, KLTarget
from cosmos_core.protocols.layout import Axis, Layout
from cosmos_core.types import JSON, Message, Payload, Prompt

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class ModelContext:
    """The model, as the recipe describes it.

    Attributes:
        path: Folder (or hub name) of a Hugging Face checkpoint; None when `config` is given.
        config: A Hugging Face config as a mapping, for a model from random weights; None when `path` is given.
        assets: Folder of the run with what was made locally: `config.json`, and the tokenizer where one is trained.
        trust_remote_code: Whether code inside a checkpoint may run; False unless the recipe says so.
    """

    path: str | None
    config: Mapping[str, JSON] | None
    assets: Path
    trust_remote_code: bool = False


@attrs.frozen(kw_only=True)
class ModelCapabilities:
    """The features that a model plugin supports.

    Attributes:
        payload_kinds: Kinds of payload that `pack` takes.
        mesh_axes: Axes of `[policy.mesh]` that may be greater than one; with `pp`, the model is a `PipelinedModel`.
        divergences: From a frozen model that it can compute; with any, `decide` takes `prediction_for` and `kl_target`.
        features: Whether it gives `ModelFacts.hidden_size` features of a decision, for a critic (`with_features`).
        blends: Whether its decisions may be regressions, and `decide` takes a `Blend`.
    """

    payload_kinds: frozenset[str] = frozenset({"tokens"})
    mesh_axes: frozenset[Axis] = frozenset()
    divergences: frozenset[DivergenceKind] = frozenset()
    features: bool = False
    blends: bool = False


@attrs.frozen(kw_only=True)
class Span:
    """Some decisions of a sequence, one after another.

    Attributes:
        first: Index of the first of them among the sequence's.
        total: Decisions of the whole sequence.
    """

    first: int
    total: int


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """Sequences packed for one forward, within the unit budget.

    Attributes:
        sequences: For each packed sequence, its index in the payloads that `pack` was given.
        num_decisions: Decisions of each packed sequence, in order; their sum is N.
        num_units: Units (prompt included) that the forward processes.
        inputs: Tensors that only the model plugin interprets, on the CPU.
        spans: Which decisions of each packed sequence these are, where a sequence may lie in several micro-batches (a
            forward of a world model is one decision); empty: all of each.
        weights_N: float32, on the CPU, each decision's part of the batch's loss, which the trainer sets; else None.
    """

    sequences: tuple[int, ...]
    num_decisions: tuple[int, ...]
    num_units: int
    inputs: Mapping[str, torch.Tensor]
    spans: tuple[Span, ...] = ()
    weights_N: torch.Tensor | None = None


@attrs.frozen(kw_only=True, eq=False)
class Decided:
    """The decisions that were taken, as a forward evaluates them.

    Attributes:
        logprobs_N: float32 log-probability of each decision, after the temperature; carries the gradient.
        entropy_N: float32 entropy of each decision's distribution, detached; None where not asked for.
        prediction: The model's prediction at each decision, by names of the model plugin; None where not asked for.
        divergence_N: float32, of the distributions, from what `kl_target` says; carries the gradient.
        blended: How far blends are off, from what `kl_target` says; None where not asked for.
        features_ND: What the model knows as it decides, such as its hidden state, with the gradient; or None.
        values_N: float32, what a critic makes of the features, and no model itself.
    """

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor | None
    prediction: Mapping[str, torch.Tensor] | None = None
    divergence_N: torch.Tensor | None = None
    blended: Blended | None = None
    features_ND: torch.Tensor | None = None
    values_N: torch.Tensor | None = None


class Model(Protocol):
    """A model family. One instance a process; it holds the tokenizer or processor, never weights."""

    def facts(self) -> ModelFacts:
        """Describe the model without building its weights; a `TriedModel` may have tried a small one."""

    def build(
        self, *, seed: int, dtype: torch.dtype, device: torch.device, layout: Layout | None = None
    ) -> torch.nn.Module:
        """Make the module: weights of `path` if given, else drawn from `seed` (bitwise the same each time).

        With a layout, every process of the mesh calls it, and the module is its part: parameters are `DTensor`s where
        they are shards, and names are those of the whole model. The weights do not depend on the layout.

        Args:
            seed: Of weights that are drawn.
            dtype: Of the parameters; float64 too, in which the kit compares layouts.
            device: Where they are.
            layout: How the module is spread; None for all of it in this process.

        Raises:
            CosmosError: A checkpoint is missing, truncated or of another architecture.
        """

    def encode(self, prompt: Prompt) -> Payload:
        """The conditioning part of a payload (`prompt` array for tokens), chat template applied.

        Raises:
            DataError: The prompt cannot be encoded.
        """

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """A payload of the prompt and its demonstration, a stop token included, as if it had been generated.

        Raises:
            DataError: The prompt has no demonstration, or cannot be encoded.
        """

    def decode(self, payload: Payload) -> str:
        """The completion of a payload as text (for rewards, reports); empty for what has no text."""

    def pack(
        self, payloads: Sequence[Payload], *, budget: int, multiple: int = 1, is_uniform: bool = False
    ) -> list[MicroBatch]:
        """Pack payloads into micro-batches of at most `budget` units each, every decision of each exactly once.

        A sequence lies in one micro-batch, or in order over several that follow each other (`MicroBatch.spans`).
        Deterministic in its arguments. Sequences never see one another. Padding is never a decision.

        Args:
            payloads: What to pack.
            budget: Most units of a micro-batch, before it is padded.
            multiple: Units of each micro-batch are padded to a multiple of it (`cp` and `tp` split them evenly).
            is_uniform: Whether all micro-batches are padded to one size (a pipeline passes on tensors of one shape).

        Raises:
            DataError: One payload alone exceeds the budget.
        """

    def decide(
        self,
        module: torch.nn.Module,
        batch: MicroBatch,
        *,
        temperature: float,
        with_entropy: bool = False,
        prediction_for: Comparison | None = None,
        kl_target: KLTarget | None = None,
        with_features: bool = False,
    ) -> Decided:
        """Evaluate the decisions of a micro-batch, in the order of `batch.sequences`.

        Every process that shares the sequences (all of `cp` and `tp`) is given the whole micro-batch, and returns all
        of its decisions; the gradient of each reaches the parameters exactly once, summed over processes.

        Args:
            module: The weights.
            batch: What to evaluate.
            temperature: Of the distributions.
            with_entropy: Whether the entropy is asked for.
            prediction_for: What `Decided.prediction` is asked for; only of a model with such `divergences` or `blends`.
            kl_target: What to compute `Decided.divergence_N` or `blended` from; likewise.
            with_features: Whether `Decided.features_ND` is asked for; only of a model that has `features`.
        """

    def export(
        self, module: torch.nn.Module, directory: Path, *, dtype: torch.dtype | None = None
    ) -> Sequence[torch.dtype]:
        """Write the weights, config and tokenizer in the family's public format (Hugging Face safetensors).

        Every process that holds a part of the module calls it.

        Args:
            module: The weights.
            directory: A folder that the caller has made, and that is empty.
            dtype: Of the floating-point tensors, but for those that the family keeps in float32 everywhere. None: that
                of each in the checkpoint at `path`; of drawn weights the config's, else the module's.

        Returns:
            The floating-point dtypes that were written, that of most values first; a config names this one.

        Raises:
            CheckpointError: It cannot be written, or a tensor, which is named, has values beyond the dtype.
        """

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:
        """Train the tokenizer of `[model.tokenizer]` on `corpus` into `context.assets`, once before any replica starts.

        Raises:
            ConfigError: `tokenizer` asks for something this family cannot make.
        """


class PipelinedModel(Model, Protocol):
    """A model whose modules can be cut into stages (`pp` in `ModelCapabilities.mesh_axes`)."""

    def stages(self, module: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """The stages that this process holds, in the order of the model."""

    def advance(self, stage: torch.nn.Module, batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Run a stage that is not the last, on what the one before returned (None for the first).

        Returns:
            What the next stage receives: one tensor, whose shape depends on `batch.num_units` only.
        """

    def conclude(self, stage: torch.nn.Module, batch: MicroBatch, received: torch.Tensor, **asked: Any) -> Decided:
        """Run the last stage; what is asked are the keywords of `decide`."""


@attrs.frozen(kw_only=True, eq=False)
class Trial:
    """A small model of the same make, to be trained for a step in several layouts.

    Attributes:
        make: Makes it, in any process; can be pickled.
        payloads: Some that it can be trained on, of at most 64 units each.
    """

    make: Callable[[], Model]
    payloads: Sequence[Payload]


@runtime_checkable
class TriedModel(Protocol):
    """A model whose plugin takes architectures that nobody has tried on every axis of the mesh.

    Planning tries a small one on the axes that a recipe uses, and refuses an axis on which it trains otherwise. What it
    could not try it says.
    """

    def trial(self, *, num_layers: int) -> Trial | None:
        """Make a small model with at least so many layers, if it has them.

        None says that the plugin's own tests have tried the architecture.

        Raises:
            UntriedError: No small one can be made.
        """


@runtime_checkable
class SleepingModel(Protocol):
    """A model that keeps more on the device than the modules that it has built, such as encoders of rows.

    Optional, beside `Model`. A rollout replica that shares its GPU (`rollout.placement`) calls both between requests.
    """

    def sleep(self) -> None:
        """Take that off the device. Whatever is asked for until `wake` is computed without the device."""

    def wake(self) -> None:
        """Use the device again."""


@attrs.frozen(kw_only=True)
class ReadTurn:
    """A turn of a model, as others read it.

    Attributes:
        message: What it says, thinks and calls. A call that cannot be read stays in its content as it was written.
        malformed: For each such call, what is wrong with it and where, in a sentence.
    """

    message: Message
    malformed: tuple[str, ...] = ()


@runtime_checkable
class MultiTurnModel(Protocol):
    """A model whose completions may go on after words that are not its own: an environment's, or a tool's.

    Optional, beside `Model`. `pack` then takes payloads with `decided` (see `cosmos_core.types.Payload`).
    """

    def encode_turns(self, prompt: Prompt, written: Sequence[int], turns: Sequence[Message]) -> Sequence[int]:
        """The token ids between the end of the model's turn and its next one.

        They follow `written` as they are: nothing that was generated is ever encoded anew. What the turns spell is
        words: it never becomes a token that ends a turn or begins one, or that stands for an image.

        Args:
            prompt: What was said before the model's last turn, its beginning at least. In a chat, what follows are
                turns by its template, in plain text their contents as they are.
            written: The token ids of the model's last turn, the stop token included; none before its first.
            turns: What others say next. A role that the chat's template does not take is the user's.

        Raises:
            DataError: The turns cannot be encoded.
        """

    def read_turn(self, prompt: Prompt, ids: Sequence[int]) -> ReadTurn:
        """Read a turn of the model; whatever the model wrote, nothing is raised.

        Args:
            prompt: What was said before it. Without `tools`, nothing is a call.
            ids: Its token ids, cut or whole.
        """


@attrs.frozen(kw_only=True)
class Record:
    """An array of payloads that a model's forwards make while an engine generates.

    Attributes:
        name: Of the array.
        dtype: A key of `cosmos_core.types.payload.ITEM_SIZES`.
        shape: Of one unit.
        option: The recipe's key that asks for it, such as `model.options.router_replay`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    option: str


@runtime_checkable
class MoEModel(Protocol):
    """A mixture of experts that balances its load between steps, and trains on the routes of the rollout.

    Optional, beside `Model`; a model that does one of the two alone gives none of the other's `counters` or `records`.
    It counts in forwards of micro-batches that have `weights_N`. An engine that records
    (`EngineCapabilities.records`) adds each array to the payloads of completions, as [P + N - 1, *shape]: all units
    but the last, which went through no forward. A unit's record is that of the forward which computed what the engine
    has cached of it: computed anew after an update, it is recorded anew.
    """

    def counters(self, module: torch.nn.Module) -> Sequence[torch.Tensor]:
        """The counts, float32, of the parts of the module that this process holds; overwritten with their sums.

        They are zeroed before the first forward of a step and summed over every process that has other sequences, or
        another slice of them, before `after_step`.
        """

    def after_step(self, module: torch.nn.Module) -> Mapping[str, float]:
        """Act on the sums, alike on all that hold a part, but on no parameter with a gradient; metrics to report."""

    def records(self) -> Sequence[Record]:
        """The arrays that the model's options ask for, found without weights; none where they ask for nothing."""

    def record(self, module: torch.nn.Module) -> Callable[[], Mapping[str, torch.Tensor]]:
        """Begin to record the forwards of a module, for as long as it lives; only where there are `records`.

        Returns:
            What the newest forward recorded, by name: [N, *shape] for its N units in their order, on its device.
        """
