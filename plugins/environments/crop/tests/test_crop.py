"""The environment shows parts of pictures, and the set's boards are told apart in their parts alone."""

import asyncio
import io
import random
from pathlib import Path

import attrs
import numpy as np
import pytest
from PIL import Image

from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext, EnvironmentContext, Turn
from cosmos_core.types import Message, Prompt
from cosmos_environment_crop.boards import COLOURS, GRID, Boards, BoardsOptions, draw_board
from cosmos_environment_crop.pictures import data_url, load
from cosmos_environment_crop.plugin import Crop, CropOptions

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
ROW = Prompt(text="What is it?", media=(data_url(PICTURE),))


def play(*turns, row=ROW, **options):
    async def dialogue():
        crop = Crop(CropOptions(**options), EnvironmentContext(name="crop", seed=0))
        assert await crop.reset(row, 0) is None
        found = [await crop.step(text) for text in turns]
        await crop.close()
        return found

    return asyncio.run(dialogue())


def pixels(location):
    return np.asarray(load(location))


def test_a_part_is_shown_pixel_for_pixel_and_is_one_of_the_whole_picture():
    for row in (ROW, Prompt(text=(Message(role="user", content="What is it?", media=ROW.media),))):
        first, second, last = play("Let me see.\n crop B2 ", "crop d4", "It is red.", row=row, observation="closer:\n")
        assert (pixels(first.media[0]) == np.asarray(PICTURE)[12:25, 17:35]).all()
        assert (pixels(second.media[0]) == np.asarray(PICTURE)[37:50, 52:70]).all()
        assert (first.observation, first.reward, first.done, first.detail) == ("closer:\n", 1.0, False, "B2")
        assert last == Turn(done=True)
    # Of more parts than pixels, each has one.
    tiny = attrs.evolve(ROW, media=(data_url(PICTURE.crop((0, 0, 2, 2))),))
    assert pixels(play("crop c9", row=tiny, rows=9)[0].media[0]).shape == (1, 1, 3)


def test_what_is_no_part_is_told_and_what_is_too_much_is_the_last_turn():
    for name in ("e1", "a5", "a0", "a", "", "a01", "b2 c3", "²2", "a-1"):
        (turn,) = play(f"crop {name}")
        assert (turn.observation, turn.done, turn.reward, turn.media) == ("no part: a1 to d4\n", False, 0.0, ())
    assert [turn.done for turn in play("crop a1", "crop e9", "crop a1", "crop a1", max_crops=2)] == [False] * 3 + [True]
    assert play("crop a1", max_crops=0) == [Turn(done=True)]
    assert [play(text)[0].done for text in ("", "\n", "crop a1\nred", "Crop a1", "cropped: red")] == [True] * 5
    assert play("<part>b2", prefix="<part>")[0].detail == "b2"


def test_a_row_without_a_readable_picture_says_so(tmp_path):
    (tmp_path / "a b.png").write_bytes(io.BytesIO(b"none").getvalue())
    for media, why in [
        ((), "the row shows no picture"),
        (("data:image/png;base64,####",), r"picture 'data:image/png;base64,####' cannot be read"),
        (("nowhere.png",), "cannot be read: .*No such file"),
        ((f"file://{tmp_path}/a%20b.png",), "cannot be read: cannot identify"),
    ]:
        with pytest.raises(DataError, match=why):
            play(row=attrs.evolve(ROW, media=media))


def test_only_its_part_tells_a_board_from_others():
    rng = random.Random(0)
    for _ in range(50):
        board = draw_board(rng, heldout=False)
        pictures = [attrs.evolve(board, colour=colour).picture() for colour in COLOURS]
        for how, most in ((Image.Resampling.BOX, 0), (Image.Resampling.BICUBIC, 4)):
            small = [np.asarray(each.resize((32, 32), how)).astype(int) for each in pictures]
            assert max(abs(each - small[0]).max() for each in small) <= most
        # Where it is can be seen: no other patch of 8 x 8 is dark.
        patches = small[0].mean(-1).reshape(4, 8, 4, 8).mean((1, 3))
        assert np.argwhere(patches < 120).tolist() == [[board.row, board.column]]
        parts = [np.asarray(each.crop(GRID.edges(board.part, each.size))).astype(int) for each in pictures]
        assert all(abs(each - parts[0]).max() > 90 for each in parts[1:])


def rows(split, number, **options):
    dataset = Boards(BoardsOptions(**options), DatasetContext(seed=0, directory=Path()))
    return [dataset.row(split, index) for index in range(number)]


def test_demonstrations_crop_the_right_part_and_read_it_or_guess():
    shown = {"guess": 0, "crop": 0, "read": 0}
    for row in rows("train", 300):
        if len(row.text) == 3:
            _, asked, part = row.text
            (turn,) = play(asked.content, row=row)
            assert (part.content, part.media) == (turn.observation, turn.media)
            assert row.demonstration == f"#### {row.reference}"
            shown["read"] += 1
        else:
            shown["crop" if row.demonstration == f"crop {row.metadata['part']}" else "guess"] += 1
    assert {name: round(number / 300, 1) for name, number in shown.items()} == {"guess": 0.4, "crop": 0.3, "read": 0.3}
    assert {len(row.text) for row in rows("heldout", 50)} == {1}
    assert {row.demonstration == f"#### {row.reference}" for row in rows("train", 50, crop=False)} == {True}


def test_train_and_heldout_share_no_picture():
    rng = random.Random(0)
    train, heldout = ({draw_board(rng, heldout=each) for _ in range(2_000)} for each in (False, True))
    assert not train & heldout
    assert [row.media for row in rows("heldout", 5)] == [row.media for row in rows("heldout", 5)]
