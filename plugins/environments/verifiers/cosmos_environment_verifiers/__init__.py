"""Environments of verifiers as agents, and their tasks as a dataset; `ChatHarness`, for verifiers looks for it here."""

from typing import Any

__all__ = ["ChatHarness"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cosmos_environment_verifiers.harness import ChatHarness  # noqa: PLC0415 - verifiers is an extra

    return ChatHarness
