"""A module's forward as one graph, compiled once for any number of tokens (`EmbeddedOptions.compile`).

torch's compiler fuses what lies between products: norms, rotations, activations. Attention and packed products stay
calls of the engine's own, so what a step means, and which weights are loaded, are looked up as ever when it runs.

Shape legend: N packed tokens, R rows kept, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from cosmos_core.errors import EngineError

Evaluate: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [R, V] of int64 tokens [N] at positions [N], of the rows [R]."""

_LEAST: Final = 2
"""A compiler takes a dimension of one for a constant."""


class CompiledForward:
    """The compiled form of a function that calls one module.

    The module's structure never changes from here on; its weights may.

    Raises:
        EngineError: This release of torch cannot keep it apart from other modules of the class.
    """

    def __init__(self, evaluate: Evaluate, name: str) -> None:
        if torch._dynamo.config.disable:  # noqa: SLF001 - documented as TORCHDYNAMO_DISABLE
            raise EngineError(_refusal(name, "TORCHDYNAMO_DISABLE is set; unset it"))
        if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
            raise EngineError(_refusal(name, f"torch {torch.__version__} is too old; install torch 2.13 or later"))
        self._name = name
        self._graph: Evaluate = torch.compile(  # type: ignore[call-overload]
            evaluate,
            fullgraph=True,
            # What guards of modules would check at every step cannot change: this engine alone has the module.
            isolate_recompiles=True,
            # One thread compiles: a pool of processes would outlast the compilation.
            options={
                "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
                "compile_threads": 1,
                # Frozen, weights would be constants of the graph, and updates would not reach them.
                "freezing": False,
            },
        )

    def compile(self, tokens_N: torch.Tensor, positions_N: torch.Tensor) -> None:
        """Compile, for any number of tokens and of rows; inside `interface.step_context`."""
        inputs = tokens_N.clone(), positions_N.clone(), torch.arange(_LEAST, device=tokens_N.device)
        for each in inputs:
            torch._dynamo.mark_dynamic(each, 0)  # noqa: SLF001 - documented, and in no other place
        try:
            self._graph(*inputs)
        except RuntimeError as error:  # what the compiler raises of every fault, those of a C++ compiler among them
            told = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            cause = next((line for line in told[1:] if "error:" in line), "")
            reason = f"{told[0]} {cause}".strip()
            raise EngineError(_refusal(self._name, reason)) from error

    def __call__(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, kept_R: torch.Tensor | None) -> torch.Tensor:
        """Logits of the tokens at `kept_R` (of all if None).

        A single token is fed twice, so that a unit comes out alike whether others are beside it or not; the step's
        step_context must say so (`interface.step_context`).
        """
        if kept_R is None:
            kept_R = torch.arange(len(tokens_N), device=tokens_N.device)
        num = len(kept_R)
        rows = kept_R if num >= _LEAST else torch.cat([kept_R, torch.arange(_LEAST - num, device=kept_R.device)])
        if is_single(tokens_N):
            tokens_N, positions_N, rows = tokens_N.repeat(2), positions_N.repeat(2), torch.arange(2, device=rows.device)
        logits_RV: torch.Tensor = self._graph(tokens_N.contiguous(), positions_N.contiguous(), rows)
        return logits_RV[:num]


def is_single(tokens_N: torch.Tensor) -> bool:
    """True if a compiled forward must be fed a step's unit twice."""
    return len(tokens_N) < _LEAST


def _refusal(name: str, reason: str) -> str:
    return (
        f"rollout.engine.options.compile: the forward of {name} cannot be compiled: {reason}; set compile = false "
        "(on a CPU it needs a C++ compiler: g++, or what CXX names)"
    )


_LIBRARY: Final = torch.library.Library("cosmos_embedded", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(
    schema: str, compute: Callable[..., torch.Tensor], like: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Define an operator of a name and signature as torch writes them.

    `like` makes an empty tensor of the result's shape, dtype and strides: all that a compiler asks for.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"cosmos_embedded::{name}", like, lib=_LIBRARY)
    defined: Any = getattr(torch.ops.cosmos_embedded, name)
    return defined.default  # type: ignore[no-any-return]
