"""Fixtures for tests of a family of world models: fixtures for a `conftest.py` that defines `make` by `make_tiny`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from cosmos_core.models.diffusion import DiffusionModel, DiffusionOptions
from cosmos_core.protocols import ModelContext

Make: TypeAlias = Callable[..., DiffusionModel]
"""`make()` makes a tiny model, `make(config=..., option=value)` another one, `make(path=...)` one of a checkpoint."""


def make_tiny(
    family: Callable[[Any, ModelContext], DiffusionModel],
    options: Callable[..., DiffusionOptions],
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    folder: Path,
) -> Make:
    """The function that makes models of a family: by default with this config of a tiny transformer and these options.

    What is made locally would be in `folder`.
    """

    def make(config: Mapping[str, Any] = config, path: str | None = None, **changes: Any) -> DiffusionModel:
        context = ModelContext(path=path, config=None if path else config, assets=folder / "assets")
        return family(options(**{**defaults, **changes}), context)

    return make


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny tensors are slower on many threads."""
    torch.set_num_threads(1)


@pytest.fixture
def model(make: Make) -> DiffusionModel:
    """A tiny model from a config."""
    return make()


@pytest.fixture
def module(model: DiffusionModel) -> torch.nn.Module:
    """The model's weights."""
    return model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[Any], str]:
    """Saves each pipeline in a folder of its own, and gives that."""

    def saved(pipeline: Any) -> str:
        folder = tempfile.mkdtemp(prefix="checkpoint-", dir=tmp_path)
        pipeline.save_pretrained(folder)
        return folder

    return saved
