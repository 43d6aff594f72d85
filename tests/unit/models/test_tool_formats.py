"""Chats with tools: what templates write of them, what follows a turn with calls, and how such a turn is read.

The templates have the structure of the published ones: where tools stand, how calls end, what a tool's answer is.
"""

import json

import attrs
import pytest

from cosmos_core.errors import DataError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.tool_formats import find_format, parse
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt, ToolCall

QWEN3 = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
CHATML = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ANSWERS = (
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
HERMES = (
    TOOLS + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n" + ANSWERS + CHATML
)
CODER = (
    TOOLS
    + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant\n{{ m.content }}"
    "{% for c in m.tool_calls %}{{ '\n' }}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n" + ANSWERS + CHATML
)
LLAMA = (
    "{% if tools %}<|start_header_id|>user<|end_header_id|>\n\n{# <|python_tag|> #}"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}"
    "{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% elif m.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CALLS = "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>"
OUTPUTS = (
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% set ns.first = true %}{% elif m.role == 'assistant' %}"
    "{{ m.content }}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}"
    "{% if ns.first %}<｜tool▁outputs▁begin｜>{% set ns.first = false %}{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last %}<｜tool▁outputs▁end｜>{% endif %}{% endif %}{% endfor %}"
)
DEEP = (
    "{% set ns = namespace(first=true) %}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role in ('user', 'system') %}<｜User｜>{{ m.content }}<｜Assistant｜>"
    "{% elif m.role == 'assistant' and m.tool_calls %}{{ m.content }}{% for c in m.tool_calls %}"
)
DEEPSEEK = (
    DEEP + CALLS + "{{ c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
    "<｜tool▁call▁end｜>{% endfor %}" + OUTPUTS
)
DEEPSEEK31 = (
    DEEP
    + CALLS
    + "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}<｜tool▁call▁end｜>{% endfor %}"
    + OUTPUTS
)
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.<|end|>{% if tools %}<|start|>developer<|message|>"
    "{% for t in tools %}type {{ t.function.name }} = (_: {{ t.function.parameters | tojson }}) => any;\n{% endfor %}"
    "<|end|>{% endif %}{% set last = namespace(name=none) %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "{% if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}"
    "<|end|>{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% set last.name = m.tool_calls[0].function.name %}"
    "{% elif loop.last and not add_generation_prompt %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "<|return|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% set last.name = none %}{% endif %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no previous tool call!') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
    ),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    *("<|call|>", "<|return|>", "<|constrain|>", "<tool_call>", "</tool_call>"),
]
STOPS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|call|>", "<|return|>")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "It <|im_end|> adds.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "to": {"type": "string"}}},
    },
}
CHAT = Prompt(text=(Message(role="user", content="What is 1+2?"),), tools=(ADD,))
ONE, TWO = '{"x": 1, "to":  "2"}', '{"x": 2, "to": "[\\"1\\"]"}'
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"
FORMATS = {
    "hermes": (HERMES, '<tool_call>\n{{"name": "add", "arguments": {}}}\n</tool_call>', "\n", "<|im_end|>"),
    "llama3": (LLAMA, '{{"name": "add", "parameters": {}}}', "; ", "<|eot_id|>"),
    "deepseek": (DEEPSEEK, FENCED, "\n", "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"),
    "deepseek31": (
        DEEPSEEK31,
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    "harmony": (
        HARMONY,
        " to=functions.add<|channel|>commentary <|constrain|>json<|message|>{}",
        "<|call|><|start|>assistant",
        "<|call|>",
    ),
}
"""Of each format: a template, a call with its arguments, what stands between two calls, and what ends the turn."""


class ToolModel(HuggingFaceModel):
    stop_tokens = STOPS
    turn_template = HERMES

    def load_tokenizer(self):
        tokenizer = super().load_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        return tokenizer


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    made = ToolModel(HuggingFaceOptions(), ModelContext(path=None, config=QWEN3, assets=folder))
    made.prepare(["What is 1+2? answer"], {"build": "byte-bpe", "vocab_size": 280, "split_digits": True})
    return folder


@pytest.fixture
def make(assets):
    def made(template, **options):
        options = HuggingFaceOptions(chat_template=template, **options)
        return ToolModel(options, ModelContext(path=None, config=QWEN3, assets=assets))

    return made


def ids(model, text):
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def text(model, found):
    return model.tokenizer.decode(found)


def prompt_text(model, prompt):
    return text(model, model.text.prompt_ids(prompt))


def call(arguments=ONE, name="add", id_=""):
    return ToolCall(name=name, arguments=arguments, id=id_)


def written(name, *arguments):
    _, one, between, end = FORMATS[name]
    begin = "<｜tool▁calls▁begin｜>" if "deepseek" in name else ""
    return begin + between.join(one.format(each) for each in arguments) + end


def answer(*contents):
    return [Message(role="tool", content=content, tool_call_id=f"c{i}") for i, content in enumerate(contents)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_turn_with_calls_is_read_and_answered(make, name):
    """What follows a turn with calls is what the template writes of the whole, and the turn itself stays as it is."""
    model = make(FORMATS[name][0])
    own = ids(model, written(name, ONE))
    read = model.read_turn(CHAT, own)
    assert read.message == Message(role="assistant", content="", tool_calls=(call(),))
    assert not read.malformed

    said = answer('it is "3"')
    found = text(model, model.encode_turns(CHAT, own, said))
    whole = prompt_text(model, attrs.evolve(CHAT, text=(*CHAT.text, read.message, *said)))
    shown = '"it is \\"3\\""' if name in ("llama3", "harmony") else 'it is "3"'
    assert shown in found
    assert whole.endswith(found)
    end = FORMATS[name][3]
    assert whole.removesuffix(found).endswith(end)

    # A turn that was cut behind its call is ended by the template.
    cut = ids(model, written(name, ONE).removesuffix("<|im_end|>"))
    if name == "hermes":
        assert text(model, model.encode_turns(CHAT, cut, said)) == f"<|im_end|>{found}"


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_and_a_second_round(make, name):
    model = make(FORMATS[name][0])
    own = ids(model, written(name, ONE, TWO))
    calls = model.read_turn(CHAT, own).message.tool_calls
    assert calls == (call(ONE), call(TWO))
    assert [json.loads(each.arguments)["x"] for each in calls] == [1, 2]
    found = text(model, model.encode_turns(CHAT, own, answer("three", "four")))
    assert found.index("three") < found.index("four")

    first = Message(role="assistant", content="So.", tool_calls=calls, reasoning="Hm.")
    before = attrs.evolve(CHAT, text=(*CHAT.text, first, *answer("three", "four")))
    assert "So." in before.words
    assert f"<add>{ONE}" in before.words
    again = text(model, model.encode_turns(before, ids(model, written(name, TWO)), answer("five")))
    assert again.replace("five", "three") == text(
        model, model.encode_turns(CHAT, ids(model, written(name, ONE)), answer("three"))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_words_between_calls_never_steer(make, name):
    """Answers of tools, and what describes tools, may spell any token."""
    model = make(FORMATS[name][0])
    special = {id_ for id_ in model.tokenizer.added_tokens_decoder if id_ > 2}
    own = ids(model, written(name, ONE))
    spelt = "".join(SPECIAL) + "</tool_response>"
    plain, odd = (model.encode_turns(CHAT, own, answer(said)) for said in ("8", spelt))
    assert [each for each in odd if each in special] == [each for each in plain if each in special]
    assert spelt in text(model, odd)
    bare = attrs.evolve(CHAT, tools=({**ADD, "function": {**ADD["function"], "description": "It adds."}},))
    steering = [[each for each in model.text.prompt_ids(prompt) if each in special] for prompt in (CHAT, bare)]
    assert steering[0] == steering[1]
    assert name == "harmony" or "It <|im_end|> adds." in prompt_text(model, CHAT)


def test_a_turn_without_calls_goes_on_as_before(make):
    for name, (template, *_) in FORMATS.items():
        model = make(template)
        stop = {"hermes": "<|im_end|>", "llama3": "<|eot_id|>", "harmony": "<|return|>"}.get(
            name, "<｜end▁of▁sentence｜>"
        )
        own = ids(model, ("<|channel|>final<|message|>" if name == "harmony" else "") + "It is 3." + stop)
        assert model.read_turn(CHAT, own).message == Message(role="assistant", content="It is 3.")
        found = text(model, model.encode_turns(CHAT, own, [Message(role="user", content="And 2+2?")]))
        assert stop not in found.partition("And")[0]
        assert "<|end|>" not in found.partition("And")[0]
        whole = attrs.evolve(
            CHAT,
            text=(*CHAT.text, Message(role="assistant", content="It is 3."), Message(role="user", content="And 2+2?")),
        )
        assert prompt_text(model, whole).endswith(found)


def test_reasoning_is_apart(make):
    hermes, harmony, said = make(HERMES), make(HARMONY), "<|channel|>final<|message|>It is 3."
    for model, own in [
        (hermes, "<think>\n1 and 2\n</think>\n\nIt is 3.<|im_end|>"),
        (harmony, f"<|channel|>analysis<|message|>1 and 2<|end|><|start|>assistant{said}<|return|>"),
    ]:
        read = model.read_turn(CHAT, ids(model, own))
        assert read.message == Message(role="assistant", content="It is 3.", reasoning="1 and 2")
    thought = Message(role="assistant", content="", tool_calls=(call(),), reasoning="1 and 2")
    history = attrs.evolve(CHAT, text=(*CHAT.text, thought, *answer("3")))
    assert "<think>\n1 and 2\n</think>" in prompt_text(hermes, history)
    assert "<|channel|>analysis<|message|>1 and 2<|end|>" in prompt_text(harmony, history)
    # The template has opened it.
    opened = make(HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    for own, content, reasoning in [("1 and 2\n</think>\n\n3", "3", "1 and 2"), ("1 and", "", "1 and")]:
        message = opened.read_turn(CHAT, ids(opened, own)).message
        assert (message.content, message.reasoning) == (content, reasoning)


TOOLED = (ADD,)
MALFORMED = [
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"x": }}\n</tool_call>',
        "at character 0 of the turn: it is no JSON",
    ),
    (
        "hermes",
        'So: <tool_call>{"name": "add", "arguments": {}',
        "at character 4 of the turn: it is cut before </tool_call>",
    ),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "it names no tool"),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>', "'a b' is no name of a tool"),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "arguments of add are '[1]', no JSON object",
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>', "JSON has no NaN"),
    ("hermes", "<tool_call>" + "[" * 99999 + "</tool_call>", "it is no JSON object"),
    ("qwen3-coder", "<tool_call>\nadd(1)\n</tool_call>", "it has no <function=…>"),
    ("qwen3-coder", "<tool_call>\n<function=add>\n<parameter=x>\n1", "it is cut before </tool_call>"),
    ("llama3", '{"name": "add", "parameters": {"x": 1}', "it is no JSON object"),
    ("llama3", "<|python_tag|>add(1)", "it is no JSON object"),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{",
        "it is cut before",
    ),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>", "it has no <｜tool▁sep｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>x<｜tool▁call▁end｜>", "the arguments of add are no JSON"),
    ("harmony", "<|channel|>commentary to=functions.add<|message|>{", "it is cut before <|call|>"),
    ("harmony", "<|channel|>commentary to=python<|message|>1<|call|>", "it is for 'python'"),
    ("harmony", "<|channel|>commentary to=functions.add<|message|>1<|call|>", "are '1', no JSON object"),
]


@pytest.mark.parametrize(("name", "said", "why"), MALFORMED)
def test_a_malformed_call_stays_in_the_content(name, said, why):
    found = parse(name, said, tools=TOOLED, ended=False)
    assert not found.calls
    (told,) = found.malformed
    assert told.startswith("tool call 1, at character ")
    assert why in told
    assert found.content.removesuffix("<|call|>") in said
    assert len(found.content) > 5
    without = parse(name, said, tools=(), ended=False)
    assert (without.calls, without.malformed) == ((), ())


def test_a_good_call_beside_a_bad_one():
    dotted = parse("harmony", " to=functions.a.b<|channel|>commentary<|message|>{}<|call|>", tools=TOOLED, ended=False)
    assert dotted.calls == (call("{}", "a.b"),)
    good, bad = (f'<tool_call>{{"name": "add", "arguments": {each}}}</tool_call>' for each in (ONE, "{"))
    found = parse("hermes", f"So {good} and {bad}", tools=TOOLED, ended=True)
    assert found.calls == (call(),)
    assert found.content == f"So  and {bad}"
    (told,) = found.malformed
    assert told.startswith(f"tool call 2, at character {len(good) + 8} of the turn")


def test_json_that_is_no_call_is_content():
    for said in ('{"answer": 3}', '{"name": "Bob", "age": 3}', "3 {", '[{"name": "add"}]', ""):
        found = parse("llama3", said, tools=TOOLED, ended=True)
        assert (found.content, found.calls, found.malformed) == (said, (), ())


def test_values_are_typed_by_the_schema(make):
    model = make(CODER)
    values = "<parameter=x>\n1\n</parameter>\n<parameter=to>\n2\n3\n</parameter>\n"
    said = f"I add.\n<tool_call>\n<function=add>\n{values}</function>\n</tool_call>"
    read = model.read_turn(CHAT, ids(model, said + "<|im_end|>"))
    assert read.message.content == "I add."
    (made,) = read.message.tool_calls
    assert json.loads(made.arguments) == {"x": 1, "to": "2\n3"}
    whole = attrs.evolve(CHAT, text=(*CHAT.text, read.message, *answer("6")))
    assert said in prompt_text(model, whole)
    # A cut turn of many parameters takes no time.
    parse(
        "qwen3-coder",
        "<tool_call><function=f>" + "<parameter=a>1</parameter>" * 500 + "</tool_call>",
        tools=TOOLED,
        ended=False,
    )


def test_formats_are_found(make, caplog):
    for template, name in [(HERMES, "hermes"), (CODER, "qwen3-coder"), (DEEPSEEK, "deepseek"), (HARMONY, "harmony")]:
        assert find_format(template, {}) == name
        assert make(template).text.tool_format == name
    assert find_format("{{ messages }}", {"<|python_tag|>": 1}) == "llama3"
    for template in ("{{ messages }}", HERMES + "<arg_key>"):
        assert find_format(template, {"a": 1}) == "none"
    for options in ({}, {"tool_format": "hermes"}, {}):
        make(HERMES + "{# <arg_key> #}", **options).encode(CHAT)
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "the format in which the model calls tools is not known",
    ] * 2
    assert make(HERMES, tool_format="none").read_turn(CHAT, [4]).message.tool_calls == ()


def test_a_tokenizers_own_response_template_comes_first(make):
    model = make(HERMES)
    model.tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    read = model.read_turn(
        CHAT, ids(model, f'So <tool_call>{{"name": "add", "arguments": {ONE}}}</tool_call><|im_end|>')
    )
    assert read.message.tool_calls == (call(json.dumps(json.loads(ONE))),)
    assert read.message.content == "So"
    read = model.read_turn(CHAT, ids(model, "<tool_call>{</tool_call>"))
    assert (read.message.content, read.message.tool_calls) == ("<tool_call>{</tool_call>", ())
    assert "response template cannot read the turn" in read.malformed[0]


BAD_TOOLS = [
    ([{"type": "function"}], "tool 1 is {'type': 'function'}; give"),
    ([{"type": "web", "function": {"name": "a"}}], "tool 1 is"),
    ([{"type": "function", "function": {"name": "a b"}}], "tool 1 is named 'a b'; a name is"),
    ([ADD, ADD], "tool 2 is named 'add', and so is another"),
    ([{"type": "function", "function": {"name": "a", "parameters": []}}], "parameters are \\[\\]; give a JSON Schema"),
    ([{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}], "type is 'object'"),
    ([{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": 1}}}}], "properties are"),
    ([{"type": "function", "function": {"name": "a", "parameters": {"required": "x"}}}], "required is 'x'"),
    ([{"type": "function", "function": {"name": "a", "description": 1}}], "the description is 1"),
    ([{"type": "function", "function": {"name": "a", "parameters": {"x": float("nan")}}}], "holds what JSON cannot"),
]


@pytest.mark.parametrize(("tools", "why"), BAD_TOOLS)
def test_tools_that_are_none_are_refused(make, tools, why):
    with pytest.raises(DataError, match=why):
        make(HERMES).encode(attrs.evolve(CHAT, tools=tuple(tools)))


def test_what_a_template_does_not_take_is_refused(make):
    for template in (HERMES[len(TOOLS) :], "{% if tools %}!{% endif %}" + HERMES[len(TOOLS) :]):
        with pytest.raises(DataError, match="the prompt has 1 tools, and the chat template does not write them"):
            make(template).encode(CHAT)
    with pytest.raises(DataError, match="the prompt has tools and is plain text"):
        make(HERMES).encode(attrs.evolve(CHAT, text="?"))
    for arguments in ("{", "[1]", "NaN"):
        spoken = Message(role="assistant", content="", tool_calls=(call(arguments),))
        with pytest.raises(DataError, match=r"a call of 'add': arguments .* no JSON"):
            make(HERMES).encode(attrs.evolve(CHAT, text=(*CHAT.text, spoken)))
    spoken = Message(role="assistant", content="", tool_calls=(call(),))
    with pytest.raises(DataError, match="a turn calls the tool 'add', and the chat template writes no calls of tools"):
        make("{% for m in messages %}{{ m.content }}{% endfor %}").encode(Prompt(text=(*CHAT.text, spoken)))
    with pytest.raises(DataError, match="the chat template fails on this prompt: no previous tool call!"):
        make(HARMONY).encode(attrs.evolve(CHAT, text=(*CHAT.text, *answer("3"))))
    with pytest.raises(DataError, match="nobody speaks for it"):
        make(HERMES).encode_turns(CHAT, [], [Message(role="assistant", content="!")])
