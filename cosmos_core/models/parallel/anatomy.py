"""The parts of a model, from its shell without weights: what stands before its layers, alike layers, what follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import nn
from transformers import PreTrainedModel

from cosmos_core.protocols.facts import ModelPart

BEFORE: Final = "embedding"
AFTER: Final = "head"


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


def parts_of(
    module: PreTrainedModel,
    anatomy: Anatomy,
    *,
    is_split: Callable[[str], bool],
    is_expert: Callable[[str], bool],
    heads: Mapping[str, int],
) -> list[ModelPart]:
    """The parts of a module on the meta device, without what they keep.

    `is_split` and `is_expert` are asked for names of parameters; `heads` counts the heads of those parameters that `tp`
    splits only if it divides their number.
    """
    inside = f"{anatomy.name}."
    named = [pair for pair in module.named_parameters() if not pair[0].startswith(inside)]
    output = module.get_output_embeddings()
    last = {id(parameter) for parameter in _after(module, anatomy)}
    if output is not None:
        last |= {id(parameter) for parameter in output.parameters()}
    embedding = module.get_input_embeddings()
    last -= {id(parameter) for parameter in embedding.parameters()}  # tied ones count with the first part

    def part(name: str, parameters: Iterable[tuple[str, nn.Parameter]], root: nn.Module | None) -> ModelPart:
        held = list(parameters)
        by_heads: dict[int, int] = {}
        for own, parameter in held:
            if own in heads:
                by_heads[heads[own]] = by_heads.get(heads[own], 0) + parameter.numel()
        return ModelPart(
            name=name,
            num_parameters=_total(held, lambda _: True),
            num_expert_parameters=_total(held, is_expert),
            num_whole_parameters=_total(held, lambda each: not is_split(each) and not is_expert(each)),
            head_parameters=by_heads,
            widths={} if root is None else widths(root),
        )

    found = [part(BEFORE, [pair for pair in named if id(pair[1]) not in last], None)]
    names = {id(layer): f"{inside}{index}." for index, layer in enumerate(anatomy.layers)}
    for number, (layer, count) in enumerate(anatomy.kinds()):
        own = [(names[id(layer)] + name, parameter) for name, parameter in layer.named_parameters()]
        found.append(attrs.evolve(part(f"layers {number + 1}", own, layer), count=count, is_layer=True))
    found.append(part(AFTER, [pair for pair in named if id(pair[1]) in last], None))
    return _named(found)


def widths(root: nn.Module) -> Mapping[str, int]:
    """Inputs and outputs together of the linear layers in a module, by the last part of their names."""
    found: dict[str, int] = {}
    for name, child in root.named_modules():
        if isinstance(child, nn.Linear):
            last = name.rpartition(".")[2]
            found[last] = found.get(last, 0) + child.in_features + child.out_features
    return found


def num_tied(module: PreTrainedModel) -> int:
    """Parameters that the embedding and the output layer share."""
    output = module.get_output_embeddings()
    embedding = module.get_input_embeddings().weight
    return 0 if output is None or output.weight is not embedding else embedding.numel()


def _after(module: PreTrainedModel, anatomy: Anatomy) -> Iterator[nn.Parameter]:
    """Parameters of what stands in the decoder behind its layers: the last norm."""
    decoder = module.get_decoder()
    children = list(decoder.children())
    behind = children[next((i + 1 for i, child in enumerate(children) if child is anatomy.layers), len(children)) :]
    for child in behind:
        yield from child.parameters()


def _likeness(layer: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return type(layer), getattr(layer, "attention_type", None), shapes


def _total(parameters: Sequence[tuple[str, torch.Tensor]], counts: Callable[[str], bool]) -> int:
    return sum(parameter.numel() for name, parameter in parameters if counts(name))


def _named(parts: list[ModelPart]) -> list[ModelPart]:
    """Layers by their numbers, from 1."""
    named, first = [], 1
    for part in parts:
        if part.is_layer:
            last = first + part.count - 1
            named.append(attrs.evolve(part, name=f"layers {first}-{last}" if last > first else f"layer {first}"))
            first = last + 1
        else:
            named.append(part)
    return named
