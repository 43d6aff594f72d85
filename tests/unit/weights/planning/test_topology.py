from cosmos_core.weights.planning.topology import Place, distances


def test_the_nearest_thing_in_common_counts():
    here = Place(process="p", host="h", rack="r")
    sources = [
        here,
        Place(process="q", host="h", rack="r"),
        Place(process="q", host="i", rack="r"),
        Place(process="q", host="i", rack="s"),
        Place(host="h"),
    ]
    assert distances(sources, [here]).tolist() == [[0], [1], [2], [3], [1]]


def test_what_is_not_known_is_nowhere_near():
    assert distances([Place()], [Place(), Place(rack="r")]).tolist() == [[3, 3]]
