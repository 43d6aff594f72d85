import numpy as np
import pytest

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.vision.rows import find_joins, join


def ones(*shape):
    return np.ones(shape, np.float32)


def test_arrays_are_joined_along_the_dim_in_which_two_images_add_up():
    padded = np.zeros((2, 4, 3), np.float32)
    padded[0, :2], padded[1, :4] = 1, 1
    joins = find_joins(
        {"patches": ones(5, 8), "tiles": ones(1, 2, 3), "nested": ones(1, 2, 3)},
        {"patches": ones(7, 8), "tiles": ones(1, 4, 3), "nested": ones(1, 4, 3)},
        {"patches": ones(12, 8), "tiles": padded, "nested": ones(1, 6, 3)},
        "TheProcessor",
    )
    assert joins == {"patches": 0, "tiles": 0, "nested": 1}


def test_what_is_not_that_of_each_side_by_side_is_refused(subtests):
    for both in [ones(3, 8), np.concatenate([ones(2, 8), 2 * ones(1, 8)]), ones(1, 8)]:
        with subtests.test(both=both):
            first, second = ones(1, 8), 3 * ones(1, 8)
            with pytest.raises(
                PluginIncompatibleError, match=r"TheProcessor makes 'x' of shape .* of two images, and of each alone"
            ):
                find_joins({"x": first}, {"x": second}, {"x": both}, "TheProcessor")


def test_smaller_arrays_are_filled_up_with_zeros():
    joined = join([ones(1, 2), ones(2, 3), ones(1, 1)], 0)
    assert joined.tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert joined.dtype == np.float32
