from cosmos_core.transport.places import Place, joined, parted


def test_places_come_back_in_order():
    places = [Place(endpoint="tcp://10.0.0.1:5", host="a"), Place(endpoint="tcp://10.0.0.2:5", host="b.example")]
    assert parted(joined(places), "elsewhere") == places


def test_an_address_without_a_host_is_on_the_replicas_own():
    assert parted("tcp://10.0.0.1:5", "a") == [Place(endpoint="tcp://10.0.0.1:5", host="a")]
    assert parted("", "a") == []
