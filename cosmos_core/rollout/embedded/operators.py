"""Operators of the engine's own: a compiled forward calls them as they are, and what they do is looked up then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

_LIBRARY: Final = torch.library.Library("cosmos_embedded", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(
    schema: str, compute: Callable[..., torch.Tensor], like: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Define an operator.

    Args:
        schema: Its name, arguments and result, as torch writes them.
        compute: What it does, on any device.
        like: Makes an empty tensor of the result's shape, dtype and strides: all that a compiler asks for.

    Returns:
        The operator.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"cosmos_embedded::{name}", like, lib=_LIBRARY)
    defined: Any = getattr(torch.ops.cosmos_embedded, name)
    return defined.default  # type: ignore[no-any-return]
