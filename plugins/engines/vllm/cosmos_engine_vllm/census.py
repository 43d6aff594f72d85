"""The census of tensors of a vLLM model beside the parameters that its loader fills: if made of weights, they go stale.

After it has loaded, vLLM may bring weights into another form: it packs experts, absorbs projections, keeps transposed
copies. An update would not reach these. So every floating-point tensor that hangs on the model is looked at before that
step and after it: what is new then, or other than it was, has been made of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import torch

from cosmos_core.weights.digest import tensor_digest

_DEPTH: Final = 4
_PACKAGE: Final = "vllm."
_CONFIGS: Final = "vllm.config"


@attrs.frozen(kw_only=True)
class Seen:
    """A tensor as it was.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        digest: Of its values.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: int


def census(model: torch.nn.Module) -> dict[str, Seen]:
    """Every floating-point tensor that hangs on the model, by where it hangs."""
    return {
        name: Seen(dtype=tensor.dtype, shape=tuple(tensor.shape), digest=tensor_digest("", tensor))
        for name, tensor in _tensors(model)
    }


def made_since(model: torch.nn.Module, before: Mapping[str, Seen]) -> list[str]:
    """Names of tensors that are new, or other than they were; not those that share memory with a parameter as it was.

    A parameter that is held in more bits than before is as it was. What is all zeros or all ones is made of nothing.
    """
    now = dict(_tensors(model))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unchanged = {name for name, tensor in now.items() if name in before and _is_same(tensor, before[name])}
    shared = {now[name].untyped_storage().data_ptr() for name in unchanged & parameters}
    return sorted(
        name
        for name, tensor in now.items()
        if name not in unchanged
        and tensor.untyped_storage().data_ptr() not in shared
        and (name in parameters or not is_default(tensor))
    )


def is_default(tensor: torch.Tensor) -> bool:
    """True if it is all zeros or all ones, as scales of what is not quantised are: weights are neither."""
    return not tensor.any() or bool((tensor == 1).all())


def _is_same(tensor: torch.Tensor, seen: Seen) -> bool:
    return tuple(tensor.shape) == seen.shape and tensor_digest("", tensor.to(seen.dtype)) == seen.digest


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    visited: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if key != "_modules":
                place = prefix if key in {"_parameters", "_buffers"} else f"{prefix}.{key}".lstrip(".")
                yield from _inside(value, place, visited, _DEPTH)


def _inside(value: object, place: str, visited: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and not value.is_meta:
            yield place, value.detach()
        return
    if depth == 0 or isinstance(value, torch.nn.Module) or id(value) in visited:
        return
    for key, inner in _parts(value):
        yield from _inside(inner, f"{place}.{key}".lstrip("."), visited | {id(value)}, depth - 1)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The parts of a container, or of an object of vLLM's own that is no description of a run."""
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), inner) for index, inner in enumerate(value))
    else:
        module = type(value).__module__
        if module.startswith(_PACKAGE) and not module.startswith(_CONFIGS) and hasattr(value, "__dict__"):
            yield from vars(value).items()
