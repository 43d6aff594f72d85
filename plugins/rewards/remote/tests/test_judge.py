"""The judge, over real sockets: what it is asked, what it answers, and what comes of it."""

import asyncio

import pytest

from cosmos_core.errors import ConfigError, DataError, PluginError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Message, Prompt
from cosmos_reward_remote.judge import Judge, JudgeOptions

PROMPT = Prompt(text="2+3?", reference={"answer": 5})


def make(url, **options):
    judge = Judge(
        JudgeOptions(url=url, model="m", **{"backoff_s": 0.01, **options}), RewardContext(name="mine", seed=0)
    )
    judge.load()
    return judge


def score(judge, *texts, prompt=PROMPT, **fields):
    async def all_of_them():
        completions = [Completion(prompt=prompt, text=text, **fields) for text in texts]
        return await asyncio.gather(*map(judge.score, completions), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_the_question_the_answer_and_the_key_are_sent(standin, secret):
    template = "Q {question} A {answer} R {reference} {other}"
    judge = make(f"{standin.url}/v1/", template=template, key_variable="JUDGE_KEY", max_tokens=9)
    turns = (Message(role="assistant", content="{reference}"), Message(role="tool", content="5"))
    (scored,) = score(judge, "{reference}5", turns=turns)
    path, headers, body, _ = standin.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {secret}"
    assert body["messages"][0]["content"] == 'Q 2+3? A {reference} R {"answer": 5} {other}'
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 9, 0.0)
    assert scored.value == 0.0
    assert "Score: 0" in scored.details["said"]


def test_turns_of_a_prompt_are_told_apart(standin):
    prompt = Prompt(text=(Message(role="system", content="Be brief."), Message(role="user", content="Hi?")))
    score(make(standin.url), "x", prompt=prompt)
    assert "system: Be brief.\nuser: Hi?" in standin.requests[0][2]["messages"][0]["content"]


def test_what_is_no_score_is_an_error(standin, subtests):
    for path, message in [
        ("no-number", "the judge gave no score: 'Score: high'"),
        ("no-score", "the judge gave no score: 'It is good.'"),
        ("below", "the judge's score is -3, and its scale goes from 0 to 10"),
        ("beyond", "the judge's score is 11, and its scale goes from 0 to 10"),
        ("huge", "the judge's score is inf, and its scale"),
        ("no-text", "the judge's answer has no text"),
        ("no-choices", "the judge's answer has no text"),
        ("a-list", "the judge's answer has no text"),
        ("garbage", "an answer that is no JSON: '<html>'"),
        ("endless", "an answer of more than 4194304 bytes"),
        ("refuse", "status 401: 'wrong key None'"),
        ("redirect", "status 302"),
        ("cut-off", "the judge was cut off at max_tokens, 1024"),
        ("range", "the judge's score is no number: '3-4'"),
        ("percent", "the judge's score is no number: '10%'"),
        ("of-five", "the judge's score is '4 out of 5', and its scale goes to 10"),
        ("thinking", "the judge gave no score: ''"),
        ("silent", "no answer within 0.5 s (2 attempts)"),
        ("hangs-up", "no connection"),
    ]:
        with subtests.test(path=path, message=message):
            standin.requests.clear()
            judge = make(f"{standin.url}/{path}", request_timeout_s=0.5 if path == "silent" else 30.0, retries=1)
            (error,) = score(judge, "x")
            assert isinstance(error, PluginError)
            assert message in str(error)
            assert str(error).startswith("reward mine: ")
            tried_again = path in ("silent", "hangs-up")
            assert standin.num_requests(1 + tried_again) == 1 + tried_again


def test_what_is_a_score(standin, subtests):
    for path in ["thought", "of-ten", "slash"]:
        with subtests.test(path=path):
            (scored,) = score(make(f"{standin.url}/{path}"), "x")
            assert scored.value == 0.7


def test_a_judge_that_is_not_there(standin):
    (error,) = score(make("http://127.0.0.1:9", retries=0), "x")
    assert "no connection" in str(error)


def test_what_passes_is_tried_again_after_the_pause_that_is_asked_for(standin):
    standin.failures["busy"] = 2
    (scored,) = score(make(f"{standin.url}/busy"), "xx")
    assert scored.value == 0.4
    times = [time for *_, time in standin.requests]
    assert len(times) == 3
    assert times[2] - times[0] > 0.19


def test_what_does_not_pass_is_given_up(standin):
    standin.failures["busy"] = 99
    (error,) = score(make(f"{standin.url}/busy", retries=2), "x")
    assert "status 503: 'later' (3 attempts)" in str(error)
    assert len(standin.requests) == 3


def test_requests_go_beside_each_other_up_to_the_limit(standin):
    scored = score(make(f"{standin.url}/slow", concurrency=8), *["x"] * 24)
    assert {each.value for each in scored} == {0.3}
    assert 2 <= standin.most_active <= 8


def test_the_key_is_in_no_message(standin, secret, caplog, capfd):
    with caplog.at_level(0):
        (error,) = score(make(f"{standin.url}/refuse", key_variable="JUDGE_KEY"), "x")
    assert "wrong key Bearer ***" in str(error)
    assert secret not in str(error) + caplog.text + "".join(capfd.readouterr())
    assert error.__cause__ is None


def test_options_that_cannot_be_are_refused(subtests):
    for options, message in [
        ({"url": "judge.example"}, "url: 'judge.example' is no address"),
        ({"url": "https://me:secret@judge.example"}, "url: it holds a name or password"),
        ({"url": "http://judge.example", "key_variable": "K"}, "would send the key of K in the clear; use https"),
        ({"url": "https://j.example", "pattern": "("}, "is no regular expression"),
        ({"url": "https://j.example", "pattern": "score"}, "has 0 groups; give it one"),
        ({"url": "https://j.example", "lowest": 10.0}, "lowest: 10.0 is not below highest"),
        ({"url": "https://j.example", "template": "{question}"}, "has no {answer}"),
    ]:
        with subtests.test(options=options, message=message):
            with pytest.raises(ConfigError) as found:
                Judge(JudgeOptions(model="m", **options), RewardContext(name="mine", seed=0))
            assert message in str(found.value)
            assert "secret@" not in str(found.value)


def test_a_key_that_is_not_there_is_told_where_it_is_needed_and_not_when_planning(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    options = JudgeOptions(model="m", url="https://j.example", key_variable="JUDGE_KEY")
    judge = Judge(options, RewardContext(name="mine", seed=0))
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set in this environment; set it to the key"):
        judge.load()


def test_a_row_without_the_reference_that_the_template_has_is_refused(standin):
    judge = make(standin.url, template="{answer} {reference}")
    with pytest.raises(DataError, match=r"the row has no reference, and the template has \{reference\}"):
        judge.vet(Prompt(text="?"))
    (error,) = score(judge, "x", prompt=Prompt(text="?"))
    assert isinstance(error, DataError)
    assert standin.requests == []
