"""The classifier against the library's own forward, and what it says of what it cannot do."""

import asyncio
import math
import subprocess
import sys
import threading

import pytest
import torch
import transformers

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Message, Prompt
from cosmos_reward_model.classifier import Classified, Classifier
from cosmos_reward_model.plugin import RewardModel, RewardModelOptions


def make(path, **options):
    model = RewardModel(RewardModelOptions(path=str(path), **options), RewardContext(name="mine", seed=0))
    model.load()
    return model


def score(model, *completions):
    async def all_of_them():
        return await asyncio.gather(*map(model.score, completions))

    return asyncio.run(all_of_them())


def completion(text, prompt="2+3=", **fields):
    return Completion(prompt=Prompt(text=prompt), text=text, **fields)


def reference(path, text):
    """The library's own answer for one text that is not padded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits[0].tolist()


def test_a_batch_scores_as_the_library_does_one_by_one(checkpoint):
    texts = ["5", "", "six, or so", "Ответ: 5"]
    scored = score(make(checkpoint), *map(completion, texts))
    expected = [reference(checkpoint, f"2+3={text}")[0] for text in texts]
    assert [each.value for each in scored] == pytest.approx(expected, abs=1e-5)
    assert len({round(each.value, 6) for each in scored}) == len(texts)
    assert scored[0].details == {"tokens": 5}


def test_without_a_padding_token_completions_are_read_one_by_one(make_checkpoint):
    path = make_checkpoint(pad=None)
    scored = score(make(path), *map(completion, ["5", "six"]))
    assert [each.value for each in scored] == pytest.approx(
        [reference(path, f"2+3={text}")[0] for text in ("5", "six")]
    )


def test_a_chat_goes_through_the_template_with_every_turn(chatty):
    prompt = (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    turns = (Message(role="assistant", content="a"), Message(role="tool", content="b"))
    (scored,) = score(make(chatty, label=2), completion("ab", prompt, turns=turns))
    assert scored.value == pytest.approx(
        reference(chatty, "<system>Be brief.<user>Hi<assistant>a<tool>b<end>")[2], abs=1e-5
    )


def test_completions_share_forwards(checkpoint, monkeypatch):
    model = make(checkpoint, batch=4, wait_ms=200.0)
    sizes, threads, classify = [], set(), Classifier.classify

    def counted(self, completions):
        sizes.append(len(completions))
        threads.add(threading.current_thread())
        return classify(self, completions)

    monkeypatch.setattr(Classifier, "classify", counted)
    score(model, *(completion(str(n)) for n in range(6)))
    assert sizes == [4, 2]
    assert threads.isdisjoint({threading.main_thread()})


def test_what_is_too_long_is_cut_off_and_told(checkpoint):
    whole, cut = score(make(checkpoint, longest=8), completion("1234"), completion("12345678"))
    assert whole.value == pytest.approx(cut.value, abs=1e-6)
    assert cut.details == {"tokens": 8, "cut_off": 4}
    (own,) = score(make(checkpoint), completion("x" * 600))
    assert own.details == {"tokens": 512, "cut_off": 92}


def test_a_sigmoid_of_any_output_is_a_number():
    outputs = Classified(outputs=(0.0, 2.0, -2000.0, 2000.0), num_tokens=1, num_cut=0)
    assert [outputs.score(label, sigmoid=True) for label in range(4)] == [0.5, 1 / (1 + math.exp(-2)), 0.0, 1.0]
    assert outputs.score(1, sigmoid=False) == 2.0


def test_a_checkpoint_that_cannot_score_is_refused(make_checkpoint, subtests):
    for fields, options, message in [
        ({}, {"label": 1}, "label: 1, but .* has 1 outputs"),
        ({"head": False}, {}, "no weights for score.weight; it was not trained to classify"),
        ({}, {"device": "cuda:99"}, "cannot be loaded as a sequence classifier"),
    ]:
        with subtests.test(fields=fields, options=options, message=message), pytest.raises(ConfigError, match=message):
            make(make_checkpoint(**fields), **options)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"path: .*nothing.* cannot be loaded"):
        make(tmp_path / "nothing")


@pytest.mark.nightly
def test_planning_imports_no_torch():
    code = (
        "import sys; from cosmos_reward_model.plugin import RewardModel, RewardModelOptions as Options; "
        "from cosmos_core.protocols import RewardContext; "
        "RewardModel(Options(path='x'), RewardContext(name='m', seed=0)); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
