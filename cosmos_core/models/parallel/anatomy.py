"""The layers of a model, and which of them are alike."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import attrs
from torch import nn
from transformers import PreTrainedModel


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
