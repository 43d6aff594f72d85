"""Facts of a model that planning needs to know, found without building weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import attrs

from cosmos_core.protocols.layout import Axis, ContextMethod

Compute: TypeAlias = Literal["float32", "bfloat16", "autocast"]
"""Dtype of a forward: of its weights, or bfloat16 over float32 weights (`autocast`)."""


@attrs.frozen(kw_only=True)
class Kept:
    """Bytes per unit that one part keeps between its forward and its backward pass.

    Attributes:
        stream: Between its blocks: `tp` splits them under sequence parallelism only.
        inputs: What its blocks take: each process of `tp` needs all of them.
        inner: Inside its blocks: `tp` splits them.
        heads: Of keys and values: `tp` splits them into whole heads, of which each process has at least one.
        routed: Inside experts: `tp` splits them where `ep` spreads the experts.
        entry: Of `stream`, what the part itself takes, which is kept where all of it is recomputed.
        products: Of `inner`, `heads` and `routed`, results of matrix products and attention (`selective` recompute).
        whole_products: Of these, those that each process of `tp` has in full width: of layers that it splits by their
            columns, or not at all.
        routed_products: Of `products`, those inside experts.
    """

    stream: float
    inputs: float
    inner: float
    routed: float
    entry: float
    products: float
    heads: float = 0.0
    whole_products: float = 0.0
    routed_products: float = 0.0


@attrs.frozen(kw_only=True)
class ModelPart:
    """Alike neighbouring pieces of a model, such as its layers; parameters that are tied count with the first.

    Attributes:
        name: For people.
        count: How many.
        is_layer: Whether a pipeline may be cut around each; parts before go with the first stage, others the last.
        num_parameters: Parameters of each.
        num_expert_parameters: Of these, those of experts that `ep` spreads.
        num_whole_parameters: Of these, those that `tp` does not split.
        head_parameters: Of these, by number of heads, those that `tp` splits only if it divides that.
        widths: Inputs and outputs together of each one's linear layers, by the last part of their names.
        kept: What each keeps for its backward pass, by dtype of the forward; empty where it is not known.
    """

    name: str
    count: int = 1
    is_layer: bool = False
    num_parameters: int
    num_expert_parameters: int = 0
    num_whole_parameters: int = 0
    head_parameters: Mapping[int, int] = attrs.field(factory=dict)
    widths: Mapping[str, int] = attrs.field(factory=dict)
    kept: Mapping[Compute, Kept] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Extent:
    """A number of a model that an axis must divide.

    Attributes:
        axis: The axis; for `cp`, where attention exchanges heads (`ulysses`).
        name: What there are so many of, for people.
        size: How many.
        is_shared: Whether the axis may be a multiple of it instead: several processes then hold the same one.
    """

    axis: Axis
    name: str
    size: int
    is_shared: bool = False


@attrs.frozen(kw_only=True)
class ModelFacts:
    """A model as planning needs to know it, found without building weights.

    Attributes:
        architecture: Class name, for people.
        num_parameters: All parameters, tied ones once.
        num_layers: Transformer layers.
        hidden_size: Width of the residual stream.
        context_length: Units the model can attend to, prompt included.
        vocab_size: Rows of the embedding (0 where there is none).
        tokenizer_size: Largest token id of the tokenizer plus one (0 where there is none).
        stop_ids: Token ids that end a completion.
        pad_id: Token id for padding.
        cache_size: Values of one unit in the cache of generation (0: as if every layer kept two rows of `hidden_size`).
        compressed_cache_size: The same where latent attention's latents are cached, of which heads are made (0: none).
        head_size: Values of one head of attention, 0 where heads are not all alike or it is not known.
        parts: The model from input to output; empty where only the totals are known.
        num_tied_parameters: Of the first part, those that the last part uses too: in a pipeline both hold them.
        num_leading_layers: Layers that the first stage of a pipeline must hold: the embedding's process adds to them.
        extents: What the axes must divide.
        context_methods: Ways of computing its attention over `cp`, one of which is its `auto`.
        impossible: Axes that cannot be greater than one for this model, though its plugin declares them, and why.
        most_outputs: Most values of the output layer that a GPU holds at once (0: those of a whole micro-batch).
        absent_weights: Where weights of its checkpoint are not there: what is missing and what to do before it can run.
        linear_layers: Names of linear layers, and of experts, that can compute in 8 bits; empty where not known.
        matrices: Shapes, by canonical name, of what `rollout.quantization` is for: linear layers [out, in] and stacked
            experts [experts, out, in], but not routers and the output layer. Empty: nothing can be quantised.
        latent_size: Values of the latents of what the recipe has it generate (0: it decides tokens).
        num_regressions: Decisions that it draws of a demonstration (`WorldModel.noised`; 0: it draws none).
        rows_per_unit: Rows of `hidden_size` that a unit is in the residual stream: 1 of a token, and of a denoising
            step as many as its latents have tokens, which `cp` splits then.
        uncounted: What its processes hold besides what is counted here, in words; then no GPU is said to hold it all.
        attends_pluggably: Whether all of its layers attend through transformers' attention interface, with which the
            embedded engine decodes; False also where that is not known.
        notices: What its users should know before a run.
        matrix_parameters: Of the layers' matrices, those that a unit goes through, so of experts as many as it chooses,
            and of what sees the rows of a text its share of all rows (0: not known).
        attention_width: Values of all heads of one layer, times the layers that attend to all units.
        column_split: Of `matrices`, those whose last dim `tp` splits: 4-bit formats need whole bytes on each process.
    """

    architecture: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    context_length: int
    vocab_size: int = 0
    tokenizer_size: int = 0
    stop_ids: frozenset[int] = frozenset()
    pad_id: int = 0
    cache_size: int = 0
    compressed_cache_size: int = 0
    head_size: int = 0
    parts: Sequence[ModelPart] = ()
    num_tied_parameters: int = 0
    num_leading_layers: int = 0
    extents: tuple[Extent, ...] = ()
    context_methods: frozenset[ContextMethod] = frozenset({"ulysses", "gather", "ring"})
    impossible: Mapping[Axis, str] = attrs.field(factory=dict)
    most_outputs: int = 0
    absent_weights: str = ""
    linear_layers: frozenset[str] = frozenset()
    matrices: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    column_split: frozenset[str] = frozenset()
    latent_size: int = 0
    num_regressions: int = 0
    rows_per_unit: int = 1
    uncounted: tuple[str, ...] = ()
    attends_pluggably: bool = False
    notices: tuple[str, ...] = ()
    matrix_parameters: int = 0
    attention_width: int = 0

    def training_flops(self, lengths: Iterable[int], decisions: int, *, adapts: bool = False) -> float:
        """Operations of a forward and backward pass: of matrices, of attention, of the output layer; 0 if not known.

        What is computed again does not count, nor do windows and states of layers that do not attend to all units,
        nor attention to a prompt's embeddings.
        Source: arXiv:2204.02311, appendix B; half of the square counts where units attend to those before them.

        Args:
            lengths: Units of each sequence.
            decisions: Those that the output layer sees.
            adapts: Whether adapters are trained, so that no gradient of the matrices themselves is computed.
        """
        rows = [length * self.rows_per_unit for length in lengths]
        # A denoising step attends to its own latents, in both directions.
        squares = sum(rows) * 2 * self.rows_per_unit if self.rows_per_unit > 1 else sum(row * row for row in rows)
        if not self.matrix_parameters:
            return 0.0
        products = self.matrix_parameters * sum(rows) + self.vocab_size * self.hidden_size * decisions
        return (4.0 if adapts else 6.0) * products + 6.0 * self.attention_width * squares
