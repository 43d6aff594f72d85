"""The pictures, the questions and the splits."""

import base64
import io
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_core.protocols import DatasetContext
from cosmos_core.types import Message
from cosmos_dataset_shapes import Drawing, Shapes, ShapesOptions
from cosmos_dataset_shapes.drawing import BACKGROUND, COLOURS, KINDS, draw_shape
from cosmos_dataset_shapes.plugin import COLOUR_QUESTIONS

CONTEXT = DatasetContext(seed=0, directory=Path())


def rows(split, number, **options):
    dataset = Shapes(ShapesOptions(**options), CONTEXT)
    return [dataset.row(split, index) for index in range(number)]


def pixels(row):
    (location,) = row.media
    head, data = location.split(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def coloured(picture):
    """Colours other than the background's."""
    return {tuple(colour) for colour in picture.reshape(-1, 3).tolist()} - {BACKGROUND}


def test_the_picture_answers_the_question():
    for row in rows("train", 100):
        (colour,) = coloured(pixels(row))
        if row.text.strip() in COLOUR_QUESTIONS:
            assert COLOURS[row.reference] == colour
        else:
            assert row.reference in KINDS
        assert row.demonstration == row.reference


def test_the_kinds_look_different():
    place = {"colour": "red", "left": 1, "top": 1, "size": 6}
    areas = {
        kind: int((np.asarray(Drawing(kind=kind, **place).picture(64)) != BACKGROUND).any(-1).sum()) for kind in KINDS
    }
    assert areas["square"] == 48 * 48
    assert areas["circle"] == pytest.approx(np.pi * 24**2, rel=0.05)
    assert areas["triangle"] == pytest.approx(48 * 48 / 2, rel=0.05)


def test_a_shape_is_wholly_in_the_picture():
    rng = random.Random(0)
    for _ in range(300):
        drawing = draw_shape(rng, heldout=False)
        assert max(drawing.left, drawing.top) + drawing.size <= 8


def test_train_and_heldout_share_no_drawing():
    rng = random.Random(0)
    train, heldout = ({draw_shape(rng, heldout=is_heldout) for _ in range(5_000)} for is_heldout in (False, True))
    assert not train & heldout
    assert len(heldout) / len(train | heldout) == pytest.approx(0.2, abs=0.03)


def test_a_chat_asks_in_a_turn():
    (row,) = rows("heldout", 1, chat=True)
    assert isinstance(row.text[0], Message)
    assert row.text[0].role == "user"


def test_another_seed_draws_other_rows():
    other = Shapes(ShapesOptions(), DatasetContext(seed=1, directory=Path()))
    assert [other.row("train", index).media for index in range(20)] != [row.media for row in rows("train", 20)]


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_dataset_shapes.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
