"""Made-up clips: what they show, what is asked of them, and what a careless demonstrator answers."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_core.protocols import DatasetContext
from cosmos_dataset_reason.clips import BACKGROUND, COLOURS, DIRECTIONS, FRAMES, OPPOSITE, SIZE, Clip
from cosmos_dataset_reason.mock import MockOptions, ReasonMock

CONTEXT = DatasetContext(seed=0, directory=Path())


def rows(split, number, **options):
    dataset = ReasonMock(MockOptions(**options), CONTEXT)
    return [dataset.row(split, index) for index in range(number)]


def seen(row):
    """The colour of the ball, and the direction in which it moves, measured on the frames."""
    (location,) = row.media
    head, data = location.split(",")
    assert head == "data:image/gif;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert (image.n_frames, image.size) == (FRAMES, (SIZE, SIZE))
        frames = []
        for number in range(FRAMES):
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")).astype(int))
    places = [np.argwhere((frame != BACKGROUND).any(-1)).mean(0) for frame in frames]
    (down, right) = places[-1] - places[0]
    (direction,) = (name for name, (x, y) in DIRECTIONS.items() if x * right + y * down > 8)
    row_of, column_of = map(round, places[0])
    (colour,) = (name for name, rgb in COLOURS.items() if tuple(frames[0][row_of, column_of]) == rgb)
    return colour, direction


def answer(row):
    """The text of the choice that the demonstration names."""
    letter = row.demonstration.removesuffix("</answer>")[-1]
    return row.reference["choices"][letter]


def test_the_clip_answers_the_question():
    asked = set()
    for row in rows("train", 60):
        colour, direction = seen(row)
        question = row.text[-1].content.partition("\n")[0]
        right = {
            "Which colour is the ball?": colour,
            "Where does the ball go?": direction,
            "Where does the ball come from?": OPPOSITE[direction],
        }[question]
        asked.add(question)
        assert row.reference["choices"][row.reference["choice"]] == right == answer(row)
        assert row.metadata["labels"][0] in {"physics", "time"}
    assert len(asked) == 3


def test_a_careless_demonstrator_answers_where_it_goes():
    wrong = 0
    for row in rows("train", 300, careless=0.5):
        right = row.reference["choices"][row.reference["choice"]]
        if answer(row) != right:
            assert row.text[-1].content.startswith("Where does the ball come from?")
            assert row.demonstration.startswith(f"<think>The ball moves {answer(row)}.</think>")
            assert OPPOSITE[answer(row)] == right
            wrong += 1
    assert 30 < wrong < 70


def test_bare_answers_and_plain_text():
    for row in rows("train", 20, careless=1.0, thought=False, chat=False, instruction=""):
        assert row.demonstration in "ABCD"
        assert isinstance(row.text, str)
        assert row.text.endswith("\n(D) down\n") or row.text.endswith("\n(D) yellow\n")


def test_no_clip_is_in_both_splits():
    shown = {split: {row.media for row in rows(split, 200)} for split in ("train", "heldout")}
    assert not shown["train"] & shown["heldout"]
    assert rows("heldout", 5) == rows("heldout", 5)


def test_a_ball_stays_in_its_frames():
    for direction in DIRECTIONS:
        for frame in Clip(colour="red", direction=direction, x=15, y=15, radius=6, speed=5).frames():
            pixels = np.asarray(frame)
            edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            assert (edge == BACKGROUND).all()


def test_options_are_refused():
    with pytest.raises(ValueError, match="careless"):
        MockOptions(careless=1.5)
    with pytest.raises(ValueError, match="needs `chat = true`"):
        MockOptions(system="s", chat=False)
