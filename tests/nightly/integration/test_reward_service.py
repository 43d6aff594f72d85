"""`cosmos reward-service`, a real process with real sockets: every request ends in results or an explicit failure."""

import asyncio
import contextlib
import io
import itertools
import json
import operator
import queue
import signal
import time
import urllib.error
import urllib.parse
import urllib.request

import aiohttp
import numpy as np
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.testing.conformance.reward import shown_as
from cosmos_core.types import SampleStatus
from tests.commandline import CommandLine

from .reward_service import CONFIG, CRASH, HANG, RAISE, TOKEN, body, serving


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("service")) as found:
        yield found


async def client(session, url, index, data):
    """One client: it asks until it has an answer that is none to wait for."""
    async with session.post(f"{url}/v1/enqueue", data=data) as answer:
        assert answer.status == 202, await answer.text()
        ticket = (await answer.json())["id"]
    while True:
        async with session.get(f"{url}/v1/fetch", params={"id": ticket, "wait_s": "10"}) as answer:
            if answer.status != 202:
                return index, answer.status, await answer.json()


@pytest.mark.timeout(120)
def test_64_clients_beside_a_scorer_that_crashes_and_hangs_all_get_their_answer(service):
    special = {5: CRASH, 21: HANG, 40: CRASH, 41: RAISE, 55: HANG, 60: RAISE}
    bodies = [body(10 + index, special.get(index, 100 + index), scorers=["sees", "moody"]) for index in range(64)]

    async def all_of_them():
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            return await asyncio.gather(*(client(session, service.url, *each) for each in enumerate(bodies)))

    before = service.metric('cosmos_reward_restarts_total{scorer="moody"}')
    answers = asyncio.run(all_of_them())
    assert len(answers) == 64
    for index, status, said in answers:
        assert status == 200
        sees, (first, second) = said["scores"]["sees"], said["scores"]["moody"]
        assert [each["value"] for each in sees] == [10.0 + index, float(special.get(index, 100 + index))]
        assert first["value"] == 10.0 + index
        if index not in special:
            assert second["value"] == 100.0 + index
            continue
        assert "value" not in second
        wanted = {
            CRASH: ("reward_failed", "the reward's process ended (exit code 7): "),
            HANG: ("reward_timeout", "no score within 2 s (timeout_s): "),
            RAISE: ("reward_failed", "ValueError: not in the mood (reward_plugins.py:42)"),
        }[special[index]]
        assert second["status"] == wanted[0]
        assert second["error"].startswith(wanted[1])
    assert service.metric('cosmos_reward_restarts_total{scorer="moody"}') >= before + 4
    assert service.metric('cosmos_reward_scores_total{scorer="moody",outcome="reward_timeout"}') >= 2
    assert service.metric("cosmos_reward_pending") == 0.0
    assert service.metric("cosmos_reward_pending_bytes") == 0.0
    assert service.ask("GET", "/health")[1]["status"] == "ok"


def test_the_token_is_asked_for_everywhere_but_at_health(service):
    for method, path in (
        *(("GET", path) for path in ("/metrics", "/v1/enqueue", "/v1/fetch?id=x", "/nowhere")),
        ("POST", "/v1/enqueue"),
        *(("POST", f"/api/reward/{name}") for name in ("ping", "enqueue", "pull")),
    ):
        for token in ("", "wrong", TOKEN + "x", TOKEN[:-1], "é"):
            status, said, headers = service.ask(method, path, b"" if method == "POST" else None, token=token)
            assert status == 401
            assert "the token is missing or another one" in str(said)
            assert headers["WWW-Authenticate"] == "Bearer"
    assert service.ask("GET", "/health", token="")[:2] == (
        200,
        {"status": "ok", "scorers": {"sees": "up", "moody": "up"}, "pending": 0},
    )
    assert service.ask("GET", "/nowhere")[0] == 404
    status, _, headers = service.ask("DELETE", "/v1/enqueue")
    assert (status, headers["Allow"]) == (405, "GET,HEAD,POST")


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"", 400, "the body has no line of JSON"),
        (body(1)[:-1], 400, "bytes instead of"),
        (body(1, 2, 3, 4, 5), 400, "completions: 5, and a request may have 4"),
        (
            body(9, scorers=["seen"]),
            400,
            "scorers: 'seen' is none of this service; did you mean sees? it has moody, sees",
        ),
        (body(9, scorers=["x"]), 400, "scorers: 'x' is none of this service; it has moody, sees"),
        (body(9, kind="latents"), 400, "completions.0: the array is uint8"),
        (b"{" * (1 << 20) + b"}", 413, "a body of 1048577 bytes, and it may have 1048576 (body_mb)"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name_and_holds_no_room(service, data, status, message):
    found, said, _ = service.enqueue(data)
    assert (found, message in said["error"]) == (status, True), said
    assert service.metric("cosmos_reward_pending_bytes") == 0.0


def test_a_body_without_a_length_is_cut_off_at_the_limit(service):
    async def send():
        async def parts():
            for _ in range(40):
                yield b"x" * (1 << 16)

        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
            session.post(f"{service.url}/v1/enqueue", data=parts()) as answer,
        ):
            return answer.status

    assert asyncio.run(send()) == 413
    assert service.metric("cosmos_reward_pending_bytes") == 0.0


def test_latents_are_scored_by_who_looks_at_them(service):
    latents = np.arange(2 * 3 * 4 * 5, dtype=np.float16).reshape(1, 2, 3, 4, 5)
    file = io.BytesIO()
    np.save(file, latents)
    line = {"version": 1, "kind": "latents", "completions": [{"prompt": "p"}]}
    data = json.dumps({**line, "scorers": ["sees"]}).encode() + b"\n" + file.getvalue()
    assert service.fetch(service.enqueue(data)[1]["id"], 10)[1]["scores"]["sees"][0]["value"] == latents.sum()
    data = json.dumps({**line, "scorers": ["moody"]}).encode() + b"\n" + file.getvalue()
    assert "'moody' scores media, and the request brings latents" in service.enqueue(data)[1]["error"]


def test_a_repeated_request_is_the_same_and_a_key_is_for_one_body(service):
    status, first, _ = service.enqueue(body(7), Idempotency_Key="k1")
    assert status == 202
    assert service.enqueue(body(7), Idempotency_Key="k1")[1]["id"] == first["id"]
    assert service.fetch(first["id"], 10)[0] == 200
    assert service.enqueue(body(7), Idempotency_Key="k1")[:2] == (202, {"id": first["id"], "status": "done"})
    status, said, _ = service.enqueue(body(8), Idempotency_Key="k1")
    assert (status, said["error"]) == (422, "Idempotency-Key: it came with another body before; take a new key")
    assert service.enqueue(body(8), Idempotency_Key="k2")[1]["id"] != first["id"]
    assert service.enqueue(body(8), Idempotency_Key="k" * 256)[0] == 400


def test_a_result_is_pending_then_there_then_expired_then_unknown(service):
    ticket = service.enqueue(body(210, scorers=["moody"]))[1]["id"]
    assert service.fetch(ticket) == (202, {"id": ticket, "status": "pending"})
    begin = time.monotonic()
    status, said = service.fetch(ticket, 10)
    assert (status, said["scores"]["moody"][0]["value"]) == (200, 210.0)
    assert said["scores"]["moody"][0]["detail"] == 'prompt: "p0"'
    assert time.monotonic() - begin < 5.0
    answers = [service.fetch(ticket)]
    while answers[-1][0] != 404 and time.monotonic() - begin < 20.0:
        time.sleep(0.1)
        answers.append(service.fetch(ticket))
    assert [status for status, _ in itertools.groupby(answers, operator.itemgetter(0))] == [200, 410, 404]
    assert {"error": f"the result of {ticket!r} has expired"} in [said for _, said in answers]
    assert answers[-1][1] == {"error": f"no request {ticket!r} is known"}
    assert time.monotonic() - begin > 5.0
    assert service.ask("GET", "/v1/fetch?id=x&wait_s=nan")[0] == 400


def test_a_client_of_cosmos_rl_is_served(service):
    frames = np.full((2, 4, 4, 3), 9, np.uint8)
    file = io.BytesIO()
    np.save(file, frames)
    line = {"prompts": ["a", "b"], "reward_fn": {"sees": 1.0, "moody": 0.5}, "media_type": "image"}
    form = {"Content-Type": "application/x-www-form-urlencoded"}

    def pull(uuid, scorer):
        data = urllib.parse.urlencode({"uuid": uuid, "type": scorer}).encode()
        return service.ask("POST", "/api/reward/pull", data, **form)[:2]

    ping = urllib.parse.urlencode({"info_data": json.dumps(line)}).encode()
    assert service.ask("POST", "/api/reward/ping", ping, **form)[:2] == (200, {"message": "Ping request received"})
    data = json.dumps(line).encode() + b"\n" + file.getvalue()
    octets = {"Content-Type": "application/octet-stream"}
    status, said, _ = service.ask("POST", "/api/reward/enqueue", data, **octets)
    assert (status, list(said)) == (200, ["uuid"])
    assert service.fetch(said["uuid"], 10)[0] == 200
    status, pulled = pull(said["uuid"], "sees")
    assert status == 200
    assert pulled.pop("duration") < "5"
    assert pulled == {
        "scores": {"sees": [9.0, 9.0]},
        "input_info": {"shape": [2, 4, 4, 3], "dtype": "torch.uint8", "min": "9.000", "max": "9.000"},
        "decoded_duration": "0.00",
        "type": "sees",
    }
    assert pull(said["uuid"], "other")[0] == 404
    assert pull("nothing", "sees")[0] == 404
    assert pull("n" * (1 << 16), "sees")[0] == 413

    frames[1, 0, 0, 0] = RAISE
    file.seek(0)
    np.save(file, frames)
    data = json.dumps({**line, "reward_fn": {"moody": 1.0}}).encode() + b"\n" + file.getvalue()
    uuid = service.ask("POST", "/api/reward/enqueue", data, **octets)[1]["uuid"]
    service.fetch(uuid, 10)
    assert pull(uuid, "moody") == (
        500,
        {"message": "reward_failed: ValueError: not in the mood (reward_plugins.py:42)"},
    )

    uuid = service.ask("POST", "/api/reward/enqueue", data.replace(bytes([RAISE, 9]), bytes([9, 9])), **octets)[1][
        "uuid"
    ]
    assert pull(uuid, "moody")[0] in (200, 400)
    status, said, _ = service.ask("POST", "/api/reward/enqueue", data.replace(b'"moody"', b'"hpsv2"'), **octets)
    assert (status, "'hpsv2' is none of this service" in said["message"]) == (400, True)


@pytest.mark.parametrize("wire", ["cosmos", "cosmos-rl"])
def test_a_run_gets_its_rewards_from_the_service_in_either_format(service, monkeypatch, wire):
    paths = ("/v1/enqueue", "/v1/fetch") if wire == "cosmos" else ("/api/reward/enqueue", "/api/reward/pull")
    for name, value in zip(
        ("ENQUEUE_URL", "FETCH_URL", "TOKEN"), (*(service.url + each for each in paths), TOKEN), strict=True
    ):
        monkeypatch.setenv(f"WFM_REWARD_{name}", value)
    options = {"scorers": {"moody": 2.0}, "wire": wire, "batch": 1, "poll_s": 0.05, "retries": 1, "backoff_s": 0.05}
    config = RewardConfig(plugin="reward-service", options=options, timeout_s=20.0)
    completions = [shown_as(np.full((2, 4, 4, 3), first, np.uint8)) for first in (30, RAISE, 40)]
    found = queue.SimpleQueue()
    with contextlib.closing(RewardPool([config], num_workers=1, seed=0)) as pool:
        pool.start()
        pool.submit(completions, found.put)
        (first,), (second,), (third,) = found.get(timeout=60)
    assert (first.value, third.value) == (60.0, 80.0)
    assert (second.value, second.status) == (None, SampleStatus.REWARD_FAILED)
    assert "ValueError: not in the mood" in second.detail
    assert TOKEN not in second.detail


def test_a_full_queue_says_when_to_come_again_and_loses_nothing(tmp_path):
    config = CONFIG.replace("queue = 100", "queue = 2\nretry_after_s = 3").replace("workers = 2", "workers = 1")
    with serving(tmp_path, config.replace("timeout_s = 2.0", "timeout_s = 10.0")) as service:
        slow = body(230, scorers=["moody"])
        taken = [service.enqueue(slow)[1]["id"] for _ in range(2)]
        status, said, headers = service.enqueue(slow)
        assert (status, headers["Retry-After"]) == (429, "3")
        assert said["error"].startswith("the queue is full: 2 requests of 2 and 0 MB of 4096 MB")
        assert [service.fetch(ticket, 20)[0] for ticket in taken] == [200, 200]
        assert service.enqueue(slow)[0] == 202


@pytest.mark.timeout(120)
def test_a_scorer_that_does_not_start_again_fails_what_it_owes_and_comes_back(tmp_path):
    with serving(tmp_path, CONFIG.replace("workers = 2", "workers = 1")) as service:
        gone = tmp_path / "no-loading"
        gone.touch()
        owed = service.enqueue(body(CRASH, 50, scorers=["moody"]))[1]["id"]
        status, said = service.fetch(owed, 20)
        assert status == 200
        assert {each["status"] for each in said["scores"]["moody"]} == {"reward_failed"}
        assert "the weights are gone" in said["scores"]["moody"][1]["error"]
        assert service.ask("GET", "/health")[1]["scorers"] == {"sees": "up", "moody": "down"}
        down = service.fetch(service.enqueue(body(50, scorers=["moody", "sees"]))[1]["id"], 20)[1]["scores"]
        assert "moody: down: " in down["moody"][0]["error"]
        assert down["sees"][0]["value"] == 50.0
        gone.unlink()
        deadline = time.monotonic() + 30.0
        while service.ask("GET", "/health")[1]["status"] != "ok" and time.monotonic() < deadline:
            time.sleep(0.1)
        again = service.fetch(service.enqueue(body(50, scorers=["moody"]))[1]["id"], 20)[1]["scores"]
        assert again["moody"][0]["value"] == 50.0


def test_ctrl_c_ends_what_was_begun_and_takes_nothing_on(tmp_path):
    with serving(tmp_path, CONFIG.replace("timeout_s = 2.0", "timeout_s = 10.0")) as service:
        ticket = service.enqueue(body(230, scorers=["moody"]))[1]["id"]
        service.process.send_signal(signal.SIGINT)
        assert service.process.stdout.readline().startswith("Stopping: waiting up to 20 s")
        status, _, headers = service.enqueue(body(9))
        assert (status, headers["Retry-After"]) == (503, "1")
        assert service.ask("GET", "/health")[0] == 503
        status, said = service.fetch(ticket, 10)
        assert (status, said["scores"]["moody"][0]["value"]) == (200, 230.0)
        assert service.process.wait(20) == 0


def test_a_second_ctrl_c_does_not_wait_and_who_waits_is_told(tmp_path):
    with serving(tmp_path, CONFIG.replace("timeout_s = 2.0", "timeout_s = 60.0")) as service:
        ticket = service.enqueue(body(HANG, scorers=["moody"]))[1]["id"]

        async def wait():
            waiting = asyncio.create_task(asyncio.to_thread(service.fetch, ticket, 30))
            await asyncio.sleep(2.0)
            service.process.send_signal(signal.SIGINT)
            await asyncio.to_thread(service.process.stdout.readline)
            service.process.send_signal(signal.SIGINT)
            return await waiting

        status, said = asyncio.run(wait())
        assert (status, said["scores"]["moody"][0]["error"]) == (200, "moody: the service was stopped")
        assert service.process.wait(10) == 0


def test_a_service_without_a_token_is_not_served(tmp_path, monkeypatch):
    monkeypatch.delenv("WFM_REWARD_TOKEN", raising=False)
    (tmp_path / "rewards.toml").write_text('[[scorer]]\nplugin = "brightness"\n')
    output = CommandLine(tmp_path)("reward-service", "--config", "rewards.toml", code=2)
    assert output.startswith("cosmos: token_variable: WFM_REWARD_TOKEN is not set; set it to what requests must bring")
