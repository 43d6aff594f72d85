"""Rows of world models: what vetting says of a demonstration is what training would say."""

import numpy as np
import pytest

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.diffusion.family import _class_named
from cosmos_core.models.diffusion.model import DiffusionModel
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Prompt


class Rows(DiffusionModel):
    """A family of which only rows are read."""


Rows.__abstractmethods__ = frozenset()


@pytest.fixture
def model(tmp_path):
    options = DiffusionOptions(num_frames=4, height=8, width=8, max_media_pixels=100)
    return Rows(options, ModelContext(path=None, config={}, assets=tmp_path))


def test_vetting_refuses_what_cannot_be_learned(subtests, model, tmp_path):
    for number, (shape, reason) in enumerate(
        [
            ((3, 8, 8, 3), "3 frames at .* are fewer than the 4"),
            ((4, 4, 20, 3), "scaled by 2, are more than the 100 pixels"),
            (None, "film.npy"),
        ]
    ):
        with subtests.test(shape=shape, reason=reason):
            folder = tmp_path / str(number)
            folder.mkdir()
            film = folder / "film.npy"
            if shape is not None:
                np.save(film, np.zeros(shape, np.uint8))
            with pytest.raises(DataError, match=reason) as vetted:
                model.vet(Prompt(text="red", demonstration=str(film)))
            with pytest.raises(DataError) as read:
                model.rows.read_pixels(str(film), 4)
            assert str(vetted.value) == str(read.value)


def test_vetting_passes_what_fits_and_what_shows_nothing(model, tmp_path):
    np.save(tmp_path / "film.npy", np.zeros((4, 8, 8, 3), np.uint8))
    model.vet(Prompt(text="red", demonstration=str(tmp_path / "film.npy")))
    model.vet(Prompt(text="red"))


def test_a_class_that_diffusers_has_not_is_named():
    with pytest.raises(ConfigError, match="has no NoSuchTransformer; install"):
        _class_named("NoSuchTransformer")
