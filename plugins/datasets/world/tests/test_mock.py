"""Made-up videos."""

import base64
import io
import itertools

import numpy as np
import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_dataset_world.mock import COLOURS, TINT


@pytest.fixture
def made(tmp_path):
    def make(seed=0, **options):
        plugins = PluginSet.load([("dataset", "world-mock")])
        return plugins.create("dataset", "world-mock", options, dataset_context(plugins, seed, tmp_path))

    return make


def frames(location):
    head, _, data = location.partition(",")
    assert head == "data:application/x-npy;base64"
    return np.load(io.BytesIO(base64.b64decode(data, validate=True)), allow_pickle=False)


def test_rows_take_the_colours_in_turn(made):
    dataset = made(prompt="something {colour}")
    rows = [dataset.row("train", index) for index in range(6)]
    assert [row.text for row in rows] == [f"something {colour}" for colour in (*COLOURS, "red", "green")]
    assert rows[4].reference == [230, 51, 51]
    assert rows[4].metadata == {"colour": "red", "num_frames": 8, "fps": 8.0, "height": 8, "width": 8}
    assert rows[4].demonstration != rows[0].demonstration
    assert made(seed=1).row("train", 0).demonstration != rows[0].demonstration


def test_videos_have_a_tint_of_their_colour(made):
    dataset = made()
    for number, colour in enumerate(COLOURS.values()):
        videos = [frames(dataset.row("train", index).demonstration) for index in range(number, 400, 4)]
        assert videos[0].dtype == np.uint8
        assert videos[0].shape == (8, 8, 8, 3)
        # The square covers 9 of 64 pixels, and is brighter by 0.4.
        expected = TINT * (np.asarray(colour) / 127.5 - 1) + 0.4 * 9 / 64
        assert np.mean(videos, axis=(0, 1, 2, 3)) / 127.5 - 1 == pytest.approx(expected, abs=0.1)


def test_a_square_moves_by_a_pixel_a_frame(made):
    video = frames(made().row("train", 3).demonstration).astype(float).sum(-1)
    brightness = video - np.median(video, axis=(1, 2), keepdims=True)
    places = [set(map(tuple, np.argwhere(frame > 90))) for frame in brightness]
    assert all(len(place) == 9 for place in places)
    shifts = {min(c for _, c in after) - min(c for _, c in before) for before, after in itertools.pairwise(places)}
    assert shifts <= {1, -5}


def test_first_frames_are_given(made):
    row = made(given_frames=2).row("heldout", 0)
    assert np.array_equal(frames(row.media[0]), frames(row.demonstration)[:2])
    assert row.metadata["num_given_frames"] == 2


def test_impossible_videos_are_refused(made, subtests):
    for options, message in [
        ({"given_frames": 8}, "`given_frames` is 8, and a video has 8 `frames`"),
        ({"height": 512, "width": 512}, "make videos of 6,291,456 bytes, more than 1,048,576"),
        ({"prompt": "{color}"}, "no field 'color'; did you mean 'colour'"),
    ]:
        with subtests.test(options=options, message=message), pytest.raises(ConfigError, match=message):
            made(**options)
