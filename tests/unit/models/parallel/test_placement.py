import itertools

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.models.parallel.placement import layer_spans, stage_indices


@pytest.mark.parametrize(
    ("per_process", "is_v_shaped", "held"),
    [
        (1, False, [(0,), (1,), (2,), (3,)]),
        (2, False, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (2, True, [(0, 7), (1, 6), (2, 5), (3, 4)]),
    ],
)
def test_stages_of_each_process(per_process, is_v_shaped, held):
    assert held == [
        stage_indices(size=4, place=place, per_process=per_process, is_v_shaped=is_v_shaped) for place in range(4)
    ]


@pytest.mark.parametrize(
    ("num_layers", "sizes"), [(8, [2, 2, 2, 2]), (9, [2, 3, 2, 2]), (11, [3, 3, 3, 2]), (4, [1, 1, 1, 1])]
)
def test_layers_are_spread_evenly_and_the_middle_takes_the_rest(num_layers, sizes):
    spans = layer_spans(num_layers, 4)
    assert [len(span) for span in spans] == sizes
    assert list(itertools.chain(*spans)) == list(range(num_layers))


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match=r"policy\.mesh\.pp: 8 pipeline stages .* the model has 6; lower pp"):
        layer_spans(6, 8)
