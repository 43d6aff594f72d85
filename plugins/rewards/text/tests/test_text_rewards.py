"""What the kit does not know of these rewards: their options, messages and details."""

import pytest

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Message, Prompt
from cosmos_reward_text.answer import inside
from cosmos_reward_text.exact import Exact, ExactOptions
from cosmos_reward_text.json_schema import JsonSchema, JsonSchemaOptions
from cosmos_reward_text.length import Length, LengthOptions
from cosmos_reward_text.pattern import Regex, RegexOptions
from cosmos_reward_text.tags import Format, FormatOptions

CONTEXT = RewardContext(name="mine", seed=0)


def completion(text, reference=None, metadata=None, **fields):
    return Completion(prompt=Prompt(text="?", reference=reference, metadata=metadata or {}), text=text, **fields)


def test_the_last_pair_of_a_tag(subtests):
    for text, found in [
        ("<a>1</a><a>2</a>", "2"),
        ("<a>1</a><a>2", "1"),
        ("<a><a>1</a>", "1"),
        ("</a><a>", None),
        ("1</a>", None),
        ("1", None),
    ]:
        with subtests.test(text=text, found=found):
            assert inside(text, "a") == found
            assert inside(text, None) == text


def test_options_that_cannot_be_are_refused(subtests):
    for make, message in [
        (lambda: Regex(RegexOptions(pattern="("), CONTEXT), r"pattern: '\(' is no regular expression"),
        (lambda: Format(FormatOptions(tags=("a", "a")), CONTEXT), "tags: a, a has one tag twice"),
        (lambda: Length(LengthOptions(), CONTEXT), "give one of them; given: none"),
        (lambda: Length(LengthOptions(target=3, longest=4), CONTEXT), "given: target, longest"),
        (lambda: Length(LengthOptions(target=3, buffer=4), CONTEXT), "buffer: 4, but there is no `longest`"),
        (lambda: Length(LengthOptions(longest=3, buffer=4), CONTEXT), "buffer: 4 is more than longest, 3"),
        (lambda: JsonSchema(JsonSchemaOptions(schema={"type": 3}), CONTEXT), "schema: it is no JSON schema: 3 is not"),
    ]:
        with subtests.test(message=message), pytest.raises(ConfigError, match=message):
            make()


def test_a_row_without_what_is_needed_is_told(subtests):
    for reward, message in [
        (Exact(ExactOptions(), CONTEXT), "reward mine: the reference None is no text, no number and no list of them"),
        (
            Regex(RegexOptions(pattern="{reference}"), CONTEXT),
            "reward mine: the reference None is no text and no number",
        ),
        (
            Length(LengthOptions(target_field="words"), CONTEXT),
            "number from 1 on, but the row has no metadata; name it in",
        ),
        (JsonSchema(JsonSchemaOptions(), CONTEXT), "the reference None is no JSON schema; give the dataset one"),
    ]:
        with subtests.test(reward=reward, message=message), pytest.raises(DataError, match=message):
            reward.vet(Prompt(text="?"))


def test_a_pattern_without_the_reference_needs_none_and_may_have_braces():
    reward = Regex(RegexOptions(pattern=r"a{2}\n.b", dot_matches_newline=True, whole=True), CONTEXT)
    reward.vet(Prompt(text="?"))
    assert reward.score(completion("aa\n\nb")).value == 1.0
    assert reward.score(completion("aa\n\nbb")).value == 0.0


def test_alternatives_of_a_reference_stay_inside_of_the_pattern():
    reward = Regex(RegexOptions(pattern="^{reference}$"), CONTEXT)
    assert reward.score(completion("a|b", "a|b")).value == 1.0
    assert reward.score(completion("a", "a|b")).value == 0.0


def test_the_format_tells_its_fault(subtests):
    for text, options, fault in [
        ("a</think><answer>8</answer>", {"begins_inside": True}, None),
        ("<think>a</think><answer>8</answer>", {"begins_inside": True}, "<think> comes 2 times"),
        ("So: <answer>8</answer>.", {"tags": ("answer",), "outside": "anything"}, None),
        ("<answer></answer>", {"tags": ("answer",), "empty": True}, None),
        ("<answer></answer>", {"tags": ("answer",)}, "there is nothing in a pair of tags"),
        ("<think>a</think>", {}, "<answer> comes 0 times"),
        ("</think>a<think><answer>8</answer>", {}, "the tags come in another order"),
        ("<think>a</think>so<answer>8</answer>", {}, "there is text outside of the tags"),
    ]:
        with subtests.test(text=text, options=options, fault=fault):
            scored = Format(FormatOptions(**options), CONTEXT).score(completion(text))
            assert (scored.value, scored.details.get("fault")) == (float(fault is None), fault)


def test_what_a_tool_wrote_is_not_the_models():
    turns = (Message(role="assistant", content="Let me see."), Message(role="tool", content="8"))
    dialogue = completion("Let me see.8", "8", turns=turns, num_units=3)
    assert Exact(ExactOptions(), CONTEXT).score(dialogue).value == 0.0
    assert Regex(RegexOptions(pattern="8"), CONTEXT).score(dialogue).value == 0.0
    assert Length(LengthOptions(target=3, unit="words"), CONTEXT).score(dialogue).value == 1.0


def test_units_of_length(subtests):
    for unit, length in [("tokens", 7), ("words", 2), ("characters", 6)]:
        with subtests.test(unit=unit, length=length):
            reward = Length(LengthOptions(target=9, unit=unit), CONTEXT)
            assert reward.score(completion("ab cde", num_units=7)).details["length"] == length


def test_no_penalty_without_a_buffer_up_to_the_longest():
    reward = Length(LengthOptions(longest=4), CONTEXT)
    assert [reward.score(completion("", num_units=n)).value for n in (0, 4, 5)] == [0.0, 0.0, -1.0]


def test_an_answer_is_found_by_its_tag_and_marker(subtests):
    for text, score in [
        ("<answer>x #### the  City of\nPARIS</answer> or so", 1.0),
        ("the city of paris", 0.0),
        ("#### the city of paris", 0.0),
        ("<answer>the city of paris</answer>", 0.0),
        ("</answer>#### the city of paris<answer>", 0.0),
    ]:
        with subtests.test(text=text, score=score):
            options = ExactOptions(tag="answer", after="####", ignore_case=True, ignore_spaces=True)
            assert Exact(options, CONTEXT).score(completion(text, "the city of Paris")).value == score


def test_a_target_of_the_row(subtests):
    for length, score in [(0, 0.0), (3, 0.75), (4, 1.0), (6, 0.5), (8, 0.0), (9, 0.0)]:
        with subtests.test(length=length, score=score):
            reward = Length(LengthOptions(unit="characters", target_field="words"), CONTEXT)
            assert reward.score(completion("x" * length, metadata={"words": 4})).value == score


def test_a_target_that_is_not_among_the_metadata_is_told_with_those_that_are():
    with pytest.raises(DataError, match="but the row has only level, part; name it in the dataset's option `metadata`"):
        Length(LengthOptions(target_field="words"), CONTEXT).vet(Prompt(text="?", metadata={"level": 1, "part": "a"}))


def test_a_target_that_is_none_is_an_error(subtests):
    for words in [0, -1, True, 2.0, "4", None]:
        with subtests.test(words=words):
            reward = Length(LengthOptions(target_field="words"), CONTEXT)
            with pytest.raises(DataError, match="a whole number from 1 on, but is "):
                reward.score(completion("x", metadata={"words": words}, num_units=3))


SCHEMA = {"type": "object", "required": ["answer"]}


def test_a_block_of_json_against_the_schema_of_the_row(subtests):
    for text, score in [
        ('So:\n```json\n{"answer": 8}\n```\n', 1.0),
        ('```text\nhi\n```\n```JSON\n{"answer": 8}\n```\nor\n```\n8\n```', 1.0),
        ('- So:\n  ```\n  {"answer": 8}\n  ```', 1.0),
        ('```python\n{"answer": 8}\n```', 0.0),
        ("```json\n" * 100_000, 0.0),
        ('{"answer": 8}', 0.0),
        ("```\n{}\n```", 0.0),
        ("```\nNaN\n```", 0.0),
        ("```\n" + "[" * 99_999 + "\n```", 0.0),
        ("```\n" + "9" * 5000 + "\n```", 0.0),
    ]:
        with subtests.test(text=text, score=score):
            assert JsonSchema(JsonSchemaOptions(fenced=True), CONTEXT).score(completion(text, SCHEMA)).value == score


def test_a_number_beyond_all_floats_is_no_failure(subtests):
    for text in ["1e999", "1" + "0" * 400]:
        with subtests.test(text=text):
            scored = JsonSchema(JsonSchemaOptions(schema={"multipleOf": 0.01}), CONTEXT).score(completion(text))
            assert scored.value == 0.0


def test_a_schema_that_is_none_or_is_elsewhere_is_an_error(subtests):
    for schema in [None, "8", {}, {"type": "objekt"}, {"$ref": "http://127.0.0.1:9/x"}]:
        with subtests.test(schema=schema), pytest.raises(DataError, match=r"reward mine: the (reference|schema)"):
            JsonSchema(JsonSchemaOptions(), CONTEXT).score(completion("{}", schema))
