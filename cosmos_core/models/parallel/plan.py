"""The plan of tensor and expert parallelism: the modules of a model that are split, and their styles.

The model's own plan says so where transformers has one; blocks it leaves out are planned by the names of their linear
layers, if all of them are known; the plugin's overrides come last. What is left out is whole on each process, which is
never wrong. A block is planned whole or not at all: a row-wise layer is right only behind column-wise ones, and where
a plugin takes these out, all else in the block is out, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast, get_args

import attrs
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.config.problems import suggestion
from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.parallel.expert import is_experts
from cosmos_core.models.parallel.forwards import own_parameters
from cosmos_core.models.parallel.stages import Anatomy, part_of
from cosmos_core.models.parallel.tensor import OUTPUTS, Style

COLUMNS: Final = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk", "wv", "q_b_proj", "kv_b_proj"),
        *("gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "w1", "w3", "dense_h_to_4h", "gate", "up"),
    }
)
ROWS: Final = frozenset(
    {
        *("o_proj", "out_proj", "dense", "wo", "o"),
        *("down_proj", "fc2", "fc_out", "c_proj", "w2", "dense_4h_to_h", "down"),
    }
)
LATENT: Final = frozenset({"kv_a_proj_with_mqa"})
WHOLE: Final = frozenset({"q_a_proj", "q_a_layernorm", "kv_a_layernorm"})
"""Maps of a latent that every head reads: their results are shared."""
HEAD_NORMS: Final = frozenset({"q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"})
ACTIVATIONS: Final = frozenset({"act_fn", "act", "activation_fn", "activation"})
KEYS_AND_VALUES: Final = frozenset({"k_proj", "v_proj", "key", "value", "wk", "wv"})
QUERIES: Final = frozenset({"q_proj", "query", "wq", "q_b_proj"})

NAMED: Final[Mapping[str, Style]] = {
    **dict.fromkeys(LATENT, "mla_kv_a_proj"),
    **dict.fromkeys(ROWS, "rowwise"),
    **dict.fromkeys(COLUMNS, "colwise"),
}
TRANSLATED: Final[Mapping[str, Style]] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "replicated_with_grad_allreduce": "summed",
    "mla_kv_a_proj": "mla_kv_a_proj",
}
"""Styles of transformers' plans, by the style here that does the same."""
APART: Final = frozenset(
    {
        *("moe_tp_experts", "moe_identity_expert", "grouped_gemm"),
        *("ep_router", "ep_dispatch_experts", "megamoe_router", "megamoe_experts"),
        *("sequence_parallel", "embedding_rowwise"),
    }
)
"""Styles without an equal here, of modules on which those beside them do not depend.

Of a block with any other foreign style, nothing is taken from the model's plan.
"""


@attrs.frozen(kw_only=True)
class ParallelPlan:
    """Styles over `tp` of modules, or of parameters that a module holds itself; `*` stands for a layer's number."""

    tensor: Mapping[str, Style]

    def style_of(self, name: str) -> Style:
        """The style of the module or parameter of this name."""
        return self.tensor.get(pattern_of(name), "replicate")


def pattern_of(name: str) -> str:
    """A name with its numbers as `*`, as plans write it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def plan_for(module: PreTrainedModel, overrides: Mapping[str, str]) -> ParallelPlan:
    """The plan of a model, or of a stage of one.

    Args:
        module: On any device; not yet parallelized.
        overrides: Styles of the plugin, by the end of a pattern, such as `self_attn.q_proj`.

    Raises:
        PluginIncompatibleError: An override names a style that does not exist, or of a whole model nothing; or they
            split some of the layers that make the inside of a block, and leave others whole.
    """
    if unknown := sorted(set(overrides.values()) - set(get_args(Style))):
        raise PluginIncompatibleError(
            f"tensor_plan of the model plugin: unknown style {unknown[0]!r}; there are {', '.join(get_args(Style))}"
        )
    anatomy = Anatomy.of(module)
    if anatomy is None:
        return ParallelPlan(tensor={})
    prefix = f"{pattern_of(anatomy.name)}.*."
    named = {name: child for name, child in module.named_modules() if pattern_of(name).startswith(prefix)}
    own = _own_plan(module, prefix, named)
    planned = {pattern.rpartition(".")[0] for pattern in own}
    tensor = {**_named_plan(module, prefix, planned), **own}
    given = _given(module, named, overrides)
    tensor = _without_whole_blocks(tensor | given, given)
    tensor |= _between(named, tensor) | given
    _refuse_mixed(named, tensor, given)
    return ParallelPlan(tensor={name: style for name, style in tensor.items() if style != "replicate"})


def _given(module: PreTrainedModel, named: Mapping[str, nn.Module], overrides: Mapping[str, str]) -> dict[str, Style]:
    """The plugin's styles, by pattern."""
    names = [*named, *(f"{name}.{key}" for name, child in named.items() for key in own_parameters(child))]
    patterns = {pattern_of(name) for name in names}
    found: dict[str, Style] = {}
    for end, style in overrides.items():
        meant = [pattern for pattern in patterns if pattern == end or pattern.endswith(f".{end}")]
        # What a stage of a pipeline lacks, another one may have.
        if not meant and part_of(module) is None:
            known = {".".join(pattern.split(".")[-2:]) for pattern in patterns}
            raise PluginIncompatibleError(
                f"tensor_plan of the model plugin: nothing in the layers of {type(module).__name__} is called {end!r} "
                f"(the vocabulary is split always); {suggestion(end, known)}"
            )
        found |= dict.fromkeys(meant, cast("Style", style))
    return found


def _without_whole_blocks(tensor: Mapping[str, Style], given: Mapping[str, Style]) -> dict[str, Style]:
    """Keep only the plugin's own styles in blocks that it names and of which no output is split."""
    parents = {name.rpartition(".")[0] for name in given}
    split = {name.rpartition(".")[0] for name, style in tensor.items() if style in OUTPUTS}
    return {
        name: style for name, style in tensor.items() if name in given or name.rpartition(".")[0] not in parents - split
    }


def _refuse_mixed(named: Mapping[str, nn.Module], tensor: Mapping[str, Style], given: Mapping[str, Style]) -> None:
    parents = {name.rpartition(".")[0] for name in given}
    inner: dict[str, dict[str, Style]] = {}
    for pattern in {pattern_of(name) for name, child in named.items() if isinstance(child, nn.Linear)}:
        parent, _, last = pattern.rpartition(".")
        if parent in parents and last in COLUMNS:
            inner.setdefault(parent, {})[last] = tensor.get(pattern, "replicate")
    for parent, styles in inner.items():
        if len(set(styles.values())) > 1:
            told = ", ".join(f"{name} {style!r}" for name, style in sorted(styles.items()))
            raise PluginIncompatibleError(
                f"tensor_plan of the model plugin: a process would have parts of different heads or columns in "
                f"{parent}: {told}; give all of them one style"
            )


def _own_plan(module: PreTrainedModel, prefix: str, named: Mapping[str, nn.Module]) -> dict[str, Style]:
    """The model's own plan, of its decoder layers, without blocks of which a part has no style here."""
    given = {name: style for name, style in (module.tp_plan or {}).items() if name.startswith(prefix)}
    blocks = {pattern_of(name) for name, child in named.items() if is_experts(child)}
    blocks |= {name.rpartition(".")[0] for name, style in given.items() if style not in TRANSLATED.keys() | APART}
    plan = {
        name: TRANSLATED[style]
        for name, style in given.items()
        if style in TRANSLATED and name.rpartition(".")[0] not in blocks
    }
    parameters = {pattern_of(f"{name}.{key}") for name, child in named.items() for key in own_parameters(child)}
    return {name: "heads" if name in parameters else style for name, style in plan.items()}


def _named_plan(module: PreTrainedModel, prefix: str, planned: set[str]) -> dict[str, Style]:
    """Blocks that have column-wise and row-wise layers and nothing unknown, by the names of these."""
    plan: dict[str, Style] = {}
    refused: set[str] = set()
    heads = (getattr(module.config.get_text_config(), "num_attention_heads", None),)
    for name, block in module.named_modules():
        pattern = pattern_of(name)
        if not f"{pattern}.".startswith(prefix) or pattern in planned:
            continue
        children = {key: child for key, child in block.named_children() if any(True for _ in child.parameters())}
        linear = {key for key, child in children.items() if isinstance(child, nn.Linear)}
        if not (linear & COLUMNS and linear & ROWS):
            continue
        is_layer = f"{pattern}." == prefix
        known = linear if is_layer else children.keys()
        extra = known - COLUMNS - ROWS - LATENT - WHOLE - HEAD_NORMS - ACTIVATIONS
        extra |= {key for key in known & HEAD_NORMS if _is_wide(block, key, module)}
        own = {} if is_layer else own_parameters(block)
        if extra or any(tuple(value.shape) != heads for value in own.values()):
            refused.add(pattern)
        plan |= {f"{pattern}.{key}": "heads" for key in own}
        plan |= {f"{pattern}.{key}": NAMED.get(key, "replicate") for key in linear}
    return {name: style for name, style in plan.items() if name.rpartition(".")[0] not in refused}


def _between(named: Mapping[str, nn.Module], tensor: Mapping[str, Style]) -> dict[str, Style]:
    """Parameters between column-wise and row-wise layers: norms of heads, and activations that learn.

    A process applies them to its part, so that the gradients of those that all parts share are partial.
    """
    found: dict[str, Style] = {}
    for name, child in named.items():
        parent, _, last = pattern_of(name).rpartition(".")
        own = own_parameters(child)
        if (
            own
            and last in HEAD_NORMS | ACTIVATIONS
            and any(tensor.get(f"{parent}.{key}") == "colwise" for key in COLUMNS)
        ):
            has_row_each = last in HEAD_NORMS and all(value.dim() > 1 for value in own.values())
            found[pattern_of(name)] = "heads" if has_row_each else "summed"
    return found


def _is_wide(block: nn.Module, name: str, module: PreTrainedModel) -> bool:
    """Tell whether a norm in a block spans several heads at once, so that no process could compute it alone."""
    width = getattr(block, "head_dim", None) or head_width(module.config.get_text_config()) or 0
    own = own_parameters(getattr(block, name)).values()
    return any(value.dim() == 1 and value.numel() > width for value in own)


def head_width(config: PretrainedConfig) -> int | None:
    """Values of one head of attention by the config of a text; None where it does not say, or layers differ in it."""
    try:
        width = getattr(config, "head_dim", None)
    except RuntimeError:
        # transformers' answer to whoever asks a config for something that each layer has of its own.
        return None
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(width, int):
        return width
    return config.hidden_size // heads if isinstance(heads, int) else None


def split_names(plan: ParallelPlan, module: PreTrainedModel) -> frozenset[str]:
    """Names of the parameters that `tp` splits: those of the plan, and the vocabulary."""
    ends = [module.get_input_embeddings(), module.get_output_embeddings()]
    vocabulary = {id(each) for end in ends if isinstance(end, nn.Embedding | nn.Linear) for each in end.parameters()}
    splits = {"colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "heads", "embedding_rowwise"}

    def is_planned(name: str) -> bool:
        owner, _, key = name.rpartition(".")
        style = plan.style_of(owner)
        return plan.style_of(name) in splits or (
            style in splits and not (key == "bias" and style.startswith("rowwise"))
        )

    return frozenset(name for name, each in module.named_parameters() if id(each) in vocabulary or is_planned(name))
