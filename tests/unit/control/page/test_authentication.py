from multidict import CIMultiDict

from cosmos_core.control.page.authentication import PageAuthentication, host_name

TOKEN = "t" * 43
HERE = PageAuthentication(token=TOKEN, bind="127.0.0.1", names=frozenset({"worker-1"}))
OUTSIDE = PageAuthentication(token=TOKEN, bind="0.0.0.0", names=frozenset({"worker-1"}))
HOST = "127.0.0.1:8080"


def refused(page=HERE, method="GET", path="/api/snapshot", *, is_data=True, host=HOST, **headers):
    given = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    if host is not None:
        given["Host"] = host
    refusal = page.refusal(method, path, given, is_data=is_data)
    return refusal.status if refusal else None


def test_only_the_token_may_change_something(subtests):
    assert refused() is None
    assert refused(method="HEAD", path="/", is_data=False) is None

    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "FOO"]:
        with subtests.test(method=method):
            assert refused(method=method) == 401
            assert refused(method=method, Authorization=f"Bearer {TOKEN}") is None

    for given in [
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \udcff\u1234",
    ]:
        with subtests.test(given=given):
            assert refused(method="POST", Authorization=given) == 401

    assert refused(method="POST", Cookie=f"token={TOKEN}") == 401
    twice = CIMultiDict([("Host", HOST), ("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")])
    assert HERE.refusal("POST", "/", twice, is_data=True).status == 401


def test_beyond_this_machine_data_needs_the_token_and_the_empty_page_does_not():
    assert OUTSIDE.is_exposed
    assert not HERE.is_exposed
    assert refused(OUTSIDE) == 401
    assert refused(OUTSIDE, Authorization=f"bearer {TOKEN}") is None
    assert refused(OUTSIDE, path="/", is_data=False) is None

    token = f"Bearer {TOKEN}"
    assert refused(OUTSIDE, host="10.0.0.7:80", Authorization=token) is None
    assert refused(OUTSIDE, host="evil.example", Authorization=token) == 403


def test_only_names_of_this_machine_are_welcome(subtests):
    for host in ["127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8080", "worker-1:80", "127.9.9.9"]:
        with subtests.test(host=host):
            assert refused(host=host) is None

    for host in [
        None,
        "",
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.7:80",
        "127.0.0.1@evil.example",
        "[::1",
        "[::1]x",
        "localhost:",
        "localhost:99999999",
        "localhost:8o",
        "localhost:²",
        "x\udc80",
    ]:
        with subtests.test(host=host):
            assert refused(host=host) == 403

    twice = CIMultiDict([("Host", HOST), ("Host", HOST)])
    assert HERE.refusal("GET", "/", twice, is_data=False).status == 403


def test_the_page_itself_may_ask_and_other_origins_and_sites_may_not(subtests):
    for origin in [f"http://{HOST}", f"https://{HOST}"]:
        with subtests.test(origin=origin):
            assert refused(Origin=origin) is None

    for origin in [
        "null",
        "",
        "http://evil.example",
        "http://127.0.0.1:8081",
        "http://localhost:8080",
        f"ftp://{HOST}",
    ]:
        with subtests.test(origin=origin):
            assert refused(Origin=origin) == 403
            assert refused(method="POST", Origin=origin, Authorization=f"Bearer {TOKEN}") == 403

    assert refused(Sec_Fetch_Site="cross-site") == 403
    assert refused(Sec_Fetch_Site="same-site") == 403
    assert refused(Sec_Fetch_Site="same-origin") is None
    assert refused(path="/", is_data=False, Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="document") is None
    assert refused(path="/", is_data=False, Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="iframe") == 403
    assert refused(path="/page.js", is_data=False, Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="script") == 403


def test_the_token_is_not_shown():
    assert TOKEN not in repr(HERE)


def test_host_names():
    found = [host_name(host) for host in ("A.b", "a:1", "[::1]", "[::1]:9", ":1", "[a]", "a:b:c", "a: 1")]
    assert found == ["a.b", "a", "::1", "::1", None, None, None, None]
