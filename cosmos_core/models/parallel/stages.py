"""The layers of a Hugging Face model, and cutting it into pipeline stages.

A stage is the whole model class with modules missing: foreign layers pass on what they are given, the embedding (and
whatever else makes embeddings, such as a vision tower) is there on the first stage only, the final norm and the output
layer on the last only. What remains keeps its name, so that checkpoints, plans and published weights know no stages.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from cosmos_core.errors import ConfigError, PluginIncompatibleError
from cosmos_core.protocols import Layout


@attrs.frozen(kw_only=True, eq=False)
class Anatomy:
    """The layers of a model, and the name of their list in the module."""

    name: str
    layers: nn.ModuleList

    @staticmethod
    def of(module: PreTrainedModel) -> Anatomy | None:
        """The layers of the text decoder; None where there is no list of them."""
        decoder = module.get_decoder()
        wanted = module.config.get_text_config().num_hidden_layers
        for name, child in module.named_modules():
            is_inside = any(each is child for each in decoder.modules())
            if isinstance(child, nn.ModuleList) and len(child) == wanted and is_inside:
                return Anatomy(name=name, layers=child)
        return None

    def kinds(self) -> list[tuple[nn.Module, int]]:
        """Runs of alike layers: the first of each, and how many."""
        runs = itertools.groupby(self.layers, key=_likeness)
        return [(alike[0], len(alike)) for alike in (list(run) for _, run in runs)]

    @property
    def num_covering(self) -> int:
        """The fewest first layers that hold every kind."""
        places = list(map(_likeness, self.layers))
        return 1 + max(places.index(each) for each in places)


def layers_name(first: int, count: int) -> str:
    """The name of a run of layers, by their numbers from 1."""
    return f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"


def widths(root: nn.Module) -> Mapping[str, int]:
    """Inputs and outputs together of the linear layers in a module, by the last part of their names."""
    found: dict[str, int] = {}
    for name, child in root.named_modules():
        if isinstance(child, nn.Linear):
            last = name.rpartition(".")[2]
            found[last] = found.get(last, 0) + child.in_features + child.out_features
    return found


def _likeness(layer: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return type(layer), getattr(layer, "attention_type", None), shapes


FINAL_NORMS: Final = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "embedding_norm")
"""What the norm after the last layer is called where a model has no pipeline plan that names it."""

_MARK: Final = "cosmos_stage"
_FAILURES: Final = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""What the forward of a model raises that cannot do without what a stage lacks."""


@attrs.frozen(kw_only=True)
class Part:
    """The part of a model that a stage is.

    Attributes:
        index: Its place in the order of stages; the first takes tokens, the last has the output layer.
        num_stages: Stages of the model.
        layers: Its layers.
        canonical: For each further name of a tied parameter, the one that the whole model lists it under.
    """

    index: int
    num_stages: int
    layers: range
    canonical: Mapping[str, str]


class Skip(nn.Module):
    """In place of a module of another stage: passes on what it is given, and answers as the module would."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Pass on what is given."""
        return hidden_states


def part_of(module: nn.Module) -> Part | None:
    """The part of a model that a stage is; None for a module that is no stage."""
    part: Part | None = getattr(module, _MARK, None)
    return part


def stages_of(module: nn.Module) -> list[nn.Module]:
    """The stages of a module; a whole one is the only stage."""
    return list(module.stages) if isinstance(module, Stages) else [module]


def cut(module: PreTrainedModel, layout: Layout) -> list[PreTrainedModel]:
    """The stages that this process holds, in the order of the model; they share the parameters of `module`.

    Raises:
        ConfigError: There are more stages than layers.
        PluginIncompatibleError: The model cannot be cut.
    """
    mesh = layout.mesh
    num_stages = mesh.size("pp") * layout.stages_per_rank
    spans = layer_spans(module.config.get_text_config().num_hidden_layers, num_stages)
    indices = stage_indices(
        size=mesh.size("pp"), place=mesh.place("pp"), per_process=layout.stages_per_rank, is_v_shaped=layout.is_v_shaped
    )
    if reason := obstacle(module):
        raise PluginIncompatibleError(
            f"{type(module).__name__} cannot be cut into pipeline stages: {reason}; set policy.mesh.pp = 1"
        )
    canonical = _canonical_names(module)
    return [
        _stage(module, Part(index=index, num_stages=num_stages, layers=spans[index], canonical=canonical))
        for index in indices
    ]


def obstacle(module: PreTrainedModel) -> str | None:
    """The reason why a model cannot be cut into stages; None if it can."""
    decoder = module.get_decoder()
    anatomy, norm = Anatomy.of(module), _final_norm(decoder)
    if anatomy is None:
        return "it has no list of its layers"
    if norm is None:
        return f"no norm after its last layer is known (looked for {', '.join(FINAL_NORMS)})"
    known = {module.get_input_embeddings(), anatomy.layers, getattr(decoder, norm)}
    others = [name for name, child in decoder.named_children() if child not in known and [*child.parameters()]]
    if others:
        return f"it has weights outside its layers that no stage is known to need: {', '.join(others)}"
    try:
        is_passed_on = _passes_on(module)
    except _FAILURES as error:
        return f"a stage without embedding fails: {type(error).__name__}: {error}"
    return None if is_passed_on else "it changes hidden states outside its layers, which every stage would repeat"


def _passes_on(module: PreTrainedModel) -> bool:
    """Tell whether a stage without layers gives what it is given."""
    hollow = _stage(module, Part(index=1, num_stages=3, layers=range(0), canonical={})).eval()
    device = next(module.parameters()).device
    given = torch.zeros(1, 2, module.config.get_text_config().hidden_size, dtype=module.dtype, device=device)
    position_ids = torch.arange(2, device=device)[None]
    with torch.no_grad():
        output = hollow.base_model(inputs_embeds=given, position_ids=position_ids, use_cache=False)
    return output.last_hidden_state is given


def _stage(module: PreTrainedModel, part: Part) -> PreTrainedModel:
    # Modules of its own, and the tensors of the original.
    stage = copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    setattr(stage, _MARK, part)
    decoder = stage.get_decoder()
    anatomy = Anatomy.of(stage)
    assert anatomy is not None, "a model without layers is not cut"
    for index, layer in enumerate(anatomy.layers):
        if index not in part.layers:
            anatomy.layers[index] = Skip(layer)
    if part.index != 0:
        _drop_inputs(stage, decoder)
    if part.index != part.num_stages - 1:
        norm = _final_norm(decoder)
        assert norm is not None, "a model without a final norm is not cut"
        setattr(decoder, norm, Skip(getattr(decoder, norm)))
        for name, child in list(stage.named_children()):
            if child is not stage.base_model:
                setattr(stage, name, None)
    return stage


def _drop_inputs(stage: PreTrainedModel, decoder: nn.Module) -> None:
    """Take away what makes embeddings: of tokens, and what there is beside the decoder, such as a vision tower."""
    embedding = stage.get_input_embeddings()
    for parent in {stage.base_model, decoder}:
        for name, child in list(parent.named_children()):
            is_beside = parent is not decoder and child is not decoder and any(True for _ in child.parameters())
            if child is embedding or is_beside:
                setattr(parent, name, None)
    # Models with a tower raise where the embedding is missing, and then deny their output layer, too.
    for each in (stage, stage.base_model, decoder):
        each.__dict__["get_input_embeddings"] = lambda: None


def _final_norm(decoder: nn.Module) -> str | None:
    """The name of the norm after the last layer: the model's own pipeline plan knows it, else a usual name."""
    plan: Mapping[str, tuple[list[str], list[str]]] = getattr(decoder.config, "base_model_pp_plan", None) or {}
    takes_hidden = [name for name, (inputs, _) in plan.items() if inputs == ["hidden_states"]]
    for name in (*takes_hidden, *FINAL_NORMS):
        if isinstance(getattr(decoder, name, None), nn.Module):
            return name
    return None


def _canonical_names(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        listed = first.setdefault(id(parameter), name)
        if listed != name:
            further[name] = listed
    return further


def stage_indices(*, size: int, place: int, per_process: int, is_v_shaped: bool) -> tuple[int, ...]:
    """The stages of the process at a place of the pipeline, in the order of the model.

    V-shaped, the order of processes turns round after each pass, instead of starting anew.
    """
    return tuple(turn * size + (size - 1 - place if is_v_shaped and turn % 2 else place) for turn in range(per_process))


def layer_spans(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, as even as can be.

    What does not divide goes to stages in the middle first: the first has the embedding, the last the output layer.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"policy.mesh.pp: {num_stages} pipeline stages need as many layers, and the model has {num_layers}; "
            "lower pp, or choose policy.parallel.schedule = '1f1b', which has one stage a process"
        )
    middle_first = [*range(1, num_stages - 1), 0, num_stages - 1]
    size, rest = divmod(num_layers, num_stages)
    longer = frozenset(middle_first[:rest])
    spans: list[range] = []
    for stage in range(num_stages):
        start = spans[-1].stop if spans else 0
        spans.append(range(start, start + size + (stage in longer)))
    return spans


def leading_problems(
    architecture: str, num_leading: int, num_layers: int, *, num_stages: int, is_split: bool
) -> Iterator[str]:
    """Yield why the first stage cannot add something to the results of leading layers, as some models do.

    Where the sequence is split over `tp` between layers, a stage has all of it behind its last one, so that it needs
    one layer more.
    """
    if not num_leading:
        return
    needed = num_leading + is_split
    first = len(layer_spans(num_layers, num_stages)[0])
    if first >= needed:
        return
    fitting = [stages for stages in range(1, num_stages) if len(layer_spans(num_layers, stages)[0]) >= needed]
    ways = [f"there can be at most {fitting[-1]}"] if fitting else []
    ways += ["set policy.parallel.sequence_parallel = false"] if is_split and first >= num_leading else []
    what = f"{num_leading} layers and one more (sequence_parallel)" if is_split else f"{num_leading} layers"
    yield (
        f"policy.mesh.pp: {architecture} adds to the results of its first layers, so the first stage "
        f"needs {what}, and of {num_stages} it has {first}; {', or '.join(ways) or 'use fewer stages'}"
    )


class Stages(nn.Module):
    """The stages of one process as one module, whose tensors have the names of the whole model.

    A tied parameter of which this process holds both ends is listed once. FSDP replaces the parameters of each stage
    by shards of its own, so there the last stage's is a copy (`copies`), which is no parameter of this module: whoever
    runs the stages copies weights to it and adds its gradients.
    """

    def __init__(self, stages: list[PreTrainedModel]) -> None:
        super().__init__()
        self.stages: Final = nn.ModuleList(stages)
        self._share_tied()

    @property
    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of a parameter and its copy in a later stage of this process."""
        first = dict(self.named_parameters())
        return [
            (first[name], parameter)
            for name, parameter in self._tensors("named_parameters")
            if parameter is not first[name]
        ]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the whole model, each once."""
        del recurse, remove_duplicate
        return self._once(prefix, "named_parameters")

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers by their names in the whole model, each once."""
        del recurse, remove_duplicate
        return self._once(prefix, "named_buffers")

    def state_dict(  # type: ignore[override]
        self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Tensors by their names in the whole model, each once."""
        assert not args, "a destination is given by name"
        given: dict[str, Any] | None = kwargs.get("destination")
        destination: dict[str, Any] = {} if given is None else given
        for stage in self.stages:
            for name, tensor in stage.state_dict(keep_vars=keep_vars).items():
                destination.setdefault(prefix + _canonical(stage, name), tensor)
        return destination

    def _share_tied(self) -> None:
        held: dict[str, nn.Parameter] = {}
        for stage in self.stages:
            for name, parameter in list(stage.named_parameters()):
                listed = held.setdefault(_canonical(stage, name), parameter)
                if listed is not parameter and not isinstance(stage, FSDPModule):
                    owner, _, last = name.rpartition(".")
                    setattr(stage.get_submodule(owner), last, listed)

    def _once(self, prefix: str, method: str) -> Iterator[tuple[str, Any]]:
        first: dict[str, Any] = {}
        for name, tensor in self._tensors(method):
            first.setdefault(name, tensor)
        yield from ((f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in first.items())

    def _tensors(self, method: str) -> Iterator[tuple[str, Any]]:
        for stage in self.stages:
            for name, tensor in getattr(stage, method)():
                yield _canonical(stage, name), tensor


def _canonical(stage: nn.Module, name: str) -> str:
    part = part_of(stage)
    return name if part is None else part.canonical.get(name, name)
