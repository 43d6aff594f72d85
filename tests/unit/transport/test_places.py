from cosmos_core.transport.places import Place, joined, parted


def test_places_come_back_in_order():
    places = [Place(endpoint="tcp://10.0.0.1:5", host="a"), Place(endpoint="tcp://10.0.0.2:5", host="b.example")]
    assert parted(joined(places), "elsewhere") == places
    racks = [
        Place(endpoint="tcp://10.0.0.1:5", host="a", rack="r1"),
        Place(endpoint="tcp://[::1]:5", host="", rack="r2"),
    ]
    assert parted(joined(racks), "mine") == [racks[0], Place(endpoint="tcp://[::1]:5", host="mine", rack="r2")]


def test_an_address_without_a_host_is_on_the_replicas_own():
    assert parted("tcp://10.0.0.1:5", "a") == [Place(endpoint="tcp://10.0.0.1:5", host="a")]
    assert parted("", "a") == []
