"""The client of reward services, over real sockets: what it sends, waits for, and makes of the answers."""

import asyncio
import json
import socket
import time

import attrs
import numpy as np
import pytest

from cosmos_core.errors import ConfigError, DataError, PluginError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.testing.conformance.reward import shown_as
from cosmos_core.types import Array, Payload, Prompt
from cosmos_reward_remote.exchange import Answer
from cosmos_reward_remote.queued import Queued, QueuedOptions
from cosmos_service_reward_service.bodies import read_body
from cosmos_service_reward_service.cosmos_rl import read_foreign

VIDEO, OTHER = np.full((2, 4, 6, 3), 10, np.uint8), np.full((3, 5, 5, 3), 20, np.uint8)
IMAGE = np.full((1, 4, 6, 3), 30, np.uint8)
SECRET = "wfm-very-secret"


def make(**options):
    made = {"scorers": {"a": 1.0}, "backoff_s": 0.01, "wait_ms": 5.0, "poll_s": 0.01, **options}
    reward = Queued(QueuedOptions(**made), RewardContext(name="mine", seed=0))
    reward.load()
    return reward


def score(reward, *completions):
    async def all_of_them():
        return await asyncio.gather(*map(reward.score, completions), return_exceptions=True)

    return asyncio.run(all_of_them())


def latents(values):
    array = Array(dtype="float32", shape=values.shape, data=values.astype("f4").tobytes())
    return Completion(prompt=Prompt(text="p"), text="", payload=Payload(kind="latents", arrays={"sample": array}))


def frames(completion):
    array = completion.media.arrays["frames"]
    return np.frombuffer(array.data, np.uint8).reshape(array.shape)


def test_what_is_shown_goes_in_batches_and_is_what_the_service_reads(queueing):
    server = queueing("good")
    shown = [shown_as(each) for each in (VIDEO, OTHER, IMAGE)]
    scored = score(make(scorers={"a": 1.0, "b": 0.5}), *shown)
    assert [each.value for each in scored] == [15.0, 30.0, 45.0]
    assert scored[0].details == {"a": "10, by a", "b": "10, by b"}
    ((path, headers, data, _),) = server.requests
    assert path == "/good/enqueue"
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert len(headers["Idempotency-Key"]) == 32
    read = read_body(data, most=3)
    assert (read.kind, read.scorers) == ("media", ("a", "b"))
    for sent, found in zip(shown, read.completions, strict=True):
        assert np.array_equal(frames(found), frames(sent))
        assert found.prompt == sent.prompt
        assert bytes(found.media.arrays["fps"].data) == bytes(sent.media.arrays["fps"].data)


def test_more_than_a_batch_are_several_requests(queueing):
    server = queueing("good")
    scored = score(make(batch=4), *(shown_as(VIDEO + index) for index in range(10)))
    assert [each.value for each in scored] == [10.0 + index for index in range(10)]
    assert sorted(len(read_body(data, most=9).completions) for *_, data, _ in server.requests) == [2, 4, 4]


def test_latents_are_sent_where_that_is_asked_for(queueing):
    server = queueing("good")
    values = np.linspace(-1, 2, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    (scored,) = score(make(send="latents"), latents(values))
    assert scored.value == pytest.approx(0.5)
    read = read_body(server.requests[0][2], most=1)
    assert read.kind == "latents"
    (error,) = score(make(send="latents"), shown_as(VIDEO))
    assert isinstance(error, DataError)
    assert "has no latents of its end" in str(error)
    (error,) = score(make(), latents(values))
    assert "the completion has no frames; use an engine that renders" in str(error)


def test_a_full_queue_is_asked_again_when_it_says_and_what_is_pending_is_waited_for(queueing):
    server = queueing("pending")
    server.busy = 2
    (scored,) = score(make(), shown_as(VIDEO))
    assert scored.value == 10.0
    times = [at for *_, at in server.requests]
    assert len(times) == 3
    assert times[2] - times[0] > 0.39
    assert len({headers["Idempotency-Key"] for _, headers, *_ in server.requests}) == 1
    assert server.polls == 3


def test_a_queue_that_is_full_for_long_is_asked_until_patience_ends(queueing):
    server = queueing("good")
    server.busy = 4
    (scored,) = score(make(retries=0), shown_as(VIDEO))
    assert scored.value == 10.0
    server.busy = 1000
    begin = time.monotonic()
    (error,) = score(make(retries=0, patience_s=0.7), shown_as(VIDEO))
    assert 0.3 < time.monotonic() - begin < 5.0
    assert "/good/enqueue: " in str(error)
    assert "status 429: full" in str(error)


def test_patience_that_ends_before_a_request_was_taken_is_told_with_the_last_reason(queueing):
    server = queueing("stuck")
    server.busy = 1
    (error,) = score(make(patience_s=0.7), shown_as(VIDEO))
    assert "/stuck/enqueue: no answer within 0.7 s (last: status 429: full)" in str(error)


def test_a_service_that_does_not_wait_is_asked_at_intervals(queueing):
    server = queueing("hasty")
    begin = time.monotonic()
    (scored,) = score(make(poll_s=0.1), shown_as(VIDEO))
    assert (scored.value, server.polls) == (10.0, 4)
    assert time.monotonic() - begin > 0.29


def test_a_request_has_no_more_than_its_megabytes(queueing):
    server = queueing("good")
    large = np.zeros((1, 400, 400, 3), np.uint8)
    shown = [shown_as(large + index) for index in range(5)]
    for options, numbers in (({"batch_mb": 1}, [1, 2, 2]), ({}, [5])):
        server.reset()
        assert [each.value for each in score(make(**options), *shown)] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert sorted(len(read_body(data, most=9).completions) for *_, data, _ in server.requests) == numbers


def test_what_one_completion_is_refused_for_costs_the_others_nothing(queueing):
    server = queueing("picky")
    odd = shown_as(VIDEO)
    fps = Array(dtype="float32", shape=(), data=np.float32(9).tobytes())
    odd = attrs.evolve(odd, media=attrs.evolve(odd.media, arrays={**odd.media.arrays, "fps": fps}))
    first, error, third = score(make(), shown_as(VIDEO), odd, shown_as(OTHER))
    assert (first.value, third.value) == (10.0, 20.0)
    assert isinstance(error, PluginError)
    assert "status 400" in str(error)
    assert len(server.requests) == 4
    server = queueing("good")
    server.reset()
    server.most_bytes = 1000
    first, second = score(make(), shown_as(VIDEO), shown_as(np.concatenate([VIDEO] * 9)))
    assert first.value == 10.0
    assert "status 413" in str(second)


def test_a_shape_that_cosmos_rl_refuses_costs_other_shapes_nothing(queueing):
    queueing("no-images", fetch="pull")
    first, error, third = score(make(wire="cosmos-rl"), *(shown_as(each) for each in (VIDEO, IMAGE, VIDEO + 1)))
    assert (first.value, third.value) == (10.0, 11.0)
    assert 'status 400: \'{"message": "no images"}\'' in str(error)


def test_a_secret_that_an_answer_repeats_is_masked_where_it_is_cut_too():
    for data in (b"x" * 195 + b"hidden", b'{"error": "' + b"x" * 195 + b'hidden"}'):
        assert "hid" not in Answer(status=400, data=data, secret="hidden").shown


def test_what_an_answer_says_fits_a_line(subtests):
    for data, said in [
        (b'{"error": "full"}', "full"),
        (b'{"error": ""}', '\'{"error": ""}\''),
        (b'{"error": "\\u001b[31mred"}', "\\\\u001b[31mred"),
        (b"[" * 100_000, "[[[["),
        (b"[1]", "'[1]'"),
        (b"\xff", "'\ufffd'"),
    ]:
        with subtests.test(data=data, said=said):
            shown = Answer(status=400, data=data).shown
            assert said in shown
            assert shown.isprintable()
            assert len(shown) < 300


def test_what_is_no_score_is_an_error_and_never_a_number(queueing, subtests):
    for kind, message in [
        ("refused", "status 400: scorers: 'x' is none of this service; it has a, b"),
        ("expired", "status 410: the result has expired"),
        ("garbage", "an answer that is no JSON object: '<html>'"),
        ("odd", "the service has no score: a: the score is no finite number: nan"),
        ("huge", "the service has no score: a: the score is no finite number: 1000"),
        ("failed", "the service has no score: a: no score within 1 s"),
        ("too-few", "scores {'a': 1} for 2 completions"),
        ("absent", "an answer without scores of a"),
        ("never", "no results within 1 s"),
    ]:
        with subtests.test(kind=kind, message=message):
            queueing(kind)
            first, second = score(make(patience_s=1.0 if kind == "never" else 20.0), shown_as(VIDEO), shown_as(VIDEO))
            assert isinstance(first, PluginError)
            assert str(first).startswith("reward mine: ")
            assert message in str(first)
            if kind in ("odd", "huge", "failed"):
                assert second.value == 10.0
            else:
                assert str(second) == str(first)


def test_a_service_that_goes_away_is_given_up(queueing):
    queueing("good")
    reward = make(retries=1)
    reward._access = attrs.evolve(reward._access, enqueue_url="http://127.0.0.1:9/enqueue")
    (error,) = score(reward, shown_as(VIDEO))
    assert "http://127.0.0.1:9/enqueue: no connection" in str(error)
    assert "(2 attempts)" in str(error)


def test_the_token_is_in_no_message(queueing, caplog, capfd):
    queueing("good")
    with caplog.at_level(0):
        reward = make()
        reward._access = attrs.evolve(reward._access, token="another-secret")
        (error,) = score(reward, shown_as(VIDEO))
    assert "status 401: 'not Bearer ***'" in str(error)
    assert "another-secret" not in str(error) + caplog.text + "".join(capfd.readouterr()) + repr(reward._access)


def test_the_service_is_asked_for_its_scorers_before_anything_is_scored(queueing):
    server = queueing("good")
    server.absent = 2
    make(scorers={"a": 1.0, "b": 0.5}, send="latents")
    assert len(server.checks) == 3
    headers, query = server.checks[-1]
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert query == {"kind": ["latents"], "scorer": ["a", "b"]}
    server.reset()
    queueing("good", fetch="pull")
    make(wire="cosmos-rl")
    assert [form["type"] for _, form in server.checks] == [["a"]]
    assert server.requests == []


def test_a_token_that_is_refused_ends_the_load(queueing, monkeypatch, subtests):
    for wire in ["cosmos", "cosmos-rl"]:
        with subtests.test(wire=wire), monkeypatch.context() as patch:
            queueing("good", fetch="pull")
            patch.setenv("WFM_REWARD_TOKEN", "stolen")
            with pytest.raises(
                ConfigError, match=r"status 401: .*; the service takes no request .* check the ad"
            ) as error:
                make(wire=wire)
            assert "stolen" not in str(error.value)


def test_a_scorer_that_the_service_does_not_know_ends_the_load(queueing):
    queueing("good")
    with pytest.raises(ConfigError, match=r"x.{1,4} is none of this service; it has a, b"):
        make(scorers={"a": 1.0, "x": 1.0})


def test_an_address_of_results_that_is_another_one_ends_the_load(queueing):
    queueing("good", fetch="fetsch")
    with pytest.raises(ConfigError, match=r"/good/fetsch: status 404: .*; the service takes no request"):
        make()
    for kind in ("elsewhere", "bare"):
        queueing(kind, fetch="pull")
        with pytest.raises(ConfigError, match=rf"/{kind}/pull: status 404: .*; the service takes no request"):
            make(wire="cosmos-rl")
    queueing("ours", fetch="pull")
    make(wire="cosmos-rl")


def test_a_service_of_an_older_release_is_told_as_such(queueing):
    queueing("older")
    with pytest.raises(PluginError, match=r"/older/enqueue: status 405: a service of an older release.*; upgrade it"):
        make()


def test_a_service_that_is_not_there_ends_the_load(queueing, monkeypatch):
    queueing("silent")
    monkeypatch.setattr("cosmos_reward_remote.queued._CHECK_S", 0.1)
    with pytest.raises(PluginError, match=r"/silent/enqueue: no answer within 0\.1 s; is the service running, and the"):
        make()
    monkeypatch.setattr("cosmos_reward_remote.queued._CHECK_S", 0.5)
    monkeypatch.setenv("WFM_REWARD_ENQUEUE_URL", "http://127.0.0.1:9/enqueue")
    with pytest.raises(PluginError, match=r"127.0.0.1:9/enqueue: no answer within 0\.5 s \(last: no connection .*\)"):
        make(backoff_s=0.001)


def test_a_service_that_is_waited_for_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr("cosmos_reward_remote.queued._CHECK_S", 1.5)
    monkeypatch.setattr("cosmos_reward_remote.queued._TOLD_S", 0.5)
    monkeypatch.setenv("WFM_REWARD_ENQUEUE_URL", "http://127.0.0.1:9/enqueue")
    monkeypatch.setenv("WFM_REWARD_FETCH_URL", "http://127.0.0.1:9/fetch")
    monkeypatch.setenv("WFM_REWARD_TOKEN", "secret")
    with pytest.raises(PluginError):
        make(backoff_s=0.001)
    (said,) = caplog.messages
    assert "127.0.0.1:9/enqueue: no connection" in said
    assert "asking again until 1.5 s have passed" in said


def test_a_service_that_is_away_is_told_by_its_variable(queueing, monkeypatch):
    queueing("good")
    reward = make()
    assert reward.absent() == ""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/enqueue"
    monkeypatch.setenv("WFM_REWARD_ENQUEUE_URL", url)
    assert reward.absent().startswith(f"WFM_REWARD_ENQUEUE_URL: {url!r}: no connection (Connection refused); start")


def test_a_service_that_starts_is_waited_for_by_time_and_not_by_attempts(queueing, monkeypatch):
    monkeypatch.setattr("cosmos_reward_remote.queued._CHECK_PAUSE_S", 0.001)
    server = queueing("good")
    server.absent = 40
    make(retries=0, backoff_s=100.0)
    assert len(server.checks) == 41


def test_videos_images_and_latents_go_to_a_service_of_cosmos_rl_as_it_reads_them(queueing):
    server = queueing("good", prefix="REMOTE_REWARD", fetch="pull")
    shown = [shown_as(each) for each in (VIDEO, IMAGE, VIDEO + 1)]
    scored = score(make(wire="cosmos-rl"), *shown)
    assert [each.value for each in scored] == [10.0, 30.0, 11.0]
    sent = {
        json.loads(data.partition(b"\n")[0])["media_type"]: data
        for path, _, data, _ in server.requests
        if "pull" not in path
    }
    assert sent.keys() == {"image", "video"}
    videos = read_foreign(sent["video"], most=2)
    assert [
        np.array_equal(frames(each), array) for each, array in zip(videos.completions, (VIDEO, VIDEO + 1), strict=True)
    ] == [True] * 2
    assert json.loads(sent["video"].partition(b"\n")[0]) == {
        "prompts": [shown[0].prompt.text] * 2,
        "reward_fn": {"a": 1.0},
        "media_type": "video",
        "video_infos": [{"video_fps": 8.0}] * 2,
    }
    assert np.array_equal(frames(read_foreign(sent["image"], most=1).completions[0]), IMAGE)
    server.reset()
    values = np.linspace(-1, 2, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    (scored,) = score(make(wire="cosmos-rl", send="latents"), latents(values))
    assert scored.value == pytest.approx(0.5, abs=1e-3)
    assert json.loads(server.requests[0][2].partition(b"\n")[0])["media_type"] == "latent"
    assert read_foreign(server.requests[0][2], most=1).kind == "latents"


def test_which_score_of_cosmos_rl_counts_is_an_option(queueing):
    queueing("renamed", fetch="pull")
    (scored,) = score(make(wire="cosmos-rl", score_keys={"a": "first+second"}), shown_as(VIDEO))
    assert scored.value == 11.0
    (error,) = score(make(wire="cosmos-rl"), shown_as(VIDEO))
    assert "no scores 'a' of 'a'; there are first, second: set score_keys to one" in str(error)
    queueing("never", fetch="pull")
    begin = time.monotonic()
    (error,) = score(make(wire="cosmos-rl", patience_s=0.3), shown_as(VIDEO))
    assert "no results within 0.3 s" in str(error)
    assert time.monotonic() - begin < 5.0


def test_a_service_that_is_not_wholly_named_is_refused_before_a_run(queueing, monkeypatch, subtests):
    for environment, message in [
        (
            {"WFM_REWARD_ENQUEUE_URL": "https://s/e", "WFM_REWARD_FETCH_URL": "https://s/f"},
            "WFM_REWARD_TOKEN: not set, but WFM_REWARD_ENQUEUE_URL and WFM_REWARD_FETCH_URL are; ",
        ),
        (
            {
                "WFM_REWARD_ENQUEUE_URL": "https://s/e",
                "REMOTE_REWARD_TOKEN": "t",
                "REMOTE_REWARD_FETCH_URL": "https://o/f",
            },
            "not set, but WFM_REWARD_ENQUEUE_URL is; a service is asked with all three, so set them where",
        ),
        ({"REMOTE_REWARD_FETCH_URL": "https://s/f", "REMOTE_REWARD_TOKEN": "t"}, "REMOTE_REWARD_ENQUEUE_URL: not set"),
        ({"ENQUEUE": "s/e"}, "WFM_REWARD_ENQUEUE_URL: 's/e' is no address"),
        (
            {"ENQUEUE": "http://s/e"},
            "WFM_REWARD_ENQUEUE_URL: 'http://s/e' would send the token in the clear; use https",
        ),
        ({"ENQUEUE": "https://me:hidden@s/e"}, "WFM_REWARD_ENQUEUE_URL: it holds a name or password"),
    ]:
        with subtests.test(environment=environment, message=message), monkeypatch.context() as patch:
            rest = {"WFM_REWARD_FETCH_URL": "https://s/f", "WFM_REWARD_TOKEN": "t"}
            whole = (
                {"WFM_REWARD_ENQUEUE_URL": environment["ENQUEUE"], **rest} if "ENQUEUE" in environment else environment
            )
            for name, value in whole.items():
                patch.setenv(name, value)
            with pytest.raises(ConfigError) as found:
                Queued(QueuedOptions(scorers={"a": 1.0}), RewardContext(name="mine", seed=0))
            assert message in str(found.value)
            assert "hidden" not in str(found.value)


def test_no_service_at_all_is_told_where_it_is_needed_and_not_when_planning(queueing, monkeypatch):
    reward = Queued(QueuedOptions(scorers={"a": 1.0}), RewardContext(name="mine", seed=0))
    with pytest.raises(
        ConfigError, match=r"ENQUEUE_URL and WFM_REWARD_FETCH_URL and WFM_REWARD_TOKEN: not set in"
    ) as error:
        reward.load()
    assert reward.absent() == str(error.value)
    monkeypatch.setenv("WFM_REWARD_TOKEN", "secret")
    assert reward.absent() == (
        "WFM_REWARD_ENQUEUE_URL and WFM_REWARD_FETCH_URL: not set in this environment; set them to where the service "
        "is: https://HOST/v1/enqueue and https://HOST/v1/fetch"
    )
    queueing("good")
    assert reward.absent() == ""


def test_options_that_contradict_each_other_are_refused():
    context = RewardContext(name="mine", seed=0)
    options = QueuedOptions(scorers={"a": 1.0}, wire="cosmos-rl", score_keys={"b": "x"})
    with pytest.raises(ConfigError, match="score_keys: b is not among scorers, a"):
        Queued(options, context)
    with pytest.raises(ConfigError, match="score_keys: only with wire = 'cosmos-rl'"):
        Queued(attrs.evolve(options, wire="cosmos", score_keys={"a": "x"}), context)
