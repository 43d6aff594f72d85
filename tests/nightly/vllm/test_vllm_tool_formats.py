"""Turns with calls of tools, read as vLLM's parsers and those of the package `renderers` read them."""

import json

import pytest

from cosmos_core.models import HuggingFaceOptions
from cosmos_core.protocols import ModelContext
from tests.unit.models.test_tool_formats import ADD, CHAT, CODER, FORMATS, ONE, QWEN3, TWO, ToolModel, ids, written

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]
VLLM = {
    "hermes": "hermes",
    "llama3": "llama3_json",
    "deepseek": "deepseek_v3",
    "deepseek31": "deepseek_v31",
    "qwen3-coder": "qwen3_coder",
}
VALUES = "<parameter=x>\n1\n</parameter>\n<parameter=to>\na <b>\nc\n</parameter>\n"
CODED = f"<tool_call>\n<function=add>\n{VALUES}</function>\n</tool_call>"
NESTED = '{"x": {"y": [1, "</tool_call"]}, "to": "\\u00e9\\"\\n}"}'
TURNS = {
    **{name: [written(name, ONE), written(name, ONE, TWO), written(name, NESTED), "It is 3."] for name in FORMATS},
    "qwen3-coder": [f"{CODED}<|im_end|>", f"I add.\n{CODED}\n{CODED}<|im_end|>", "It is 3."],
}
TURNS["hermes"] += [f"<think>\n1 and 2\n</think>\n\nSo:\n{TURNS['hermes'][0]}", "<tool_call>\n{</tool_call>", "{}"]
TURNS["harmony"] = [
    f"<|channel|>analysis<|message|>1 and 2<|end|><|start|>assistant{each}" for each in TURNS["harmony"]
]
TURNS["harmony"][-1] = "<|channel|>final<|message|>It is 3.<|return|>"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    context = ModelContext(path=None, config=QWEN3, assets=folder)
    ToolModel(HuggingFaceOptions(), context).prepare(
        ["What is 1+2? answer"], {"build": "byte-bpe", "vocab_size": 280, "split_digits": True}
    )
    templates = {**{name: each[0] for name, each in FORMATS.items()}, "qwen3-coder": CODER}
    return {name: ToolModel(HuggingFaceOptions(chat_template=text), context) for name, text in templates.items()}


def read(model, said):
    message = model.read_turn(CHAT, ids(model, said)).message
    return message, [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("name", VLLM)
def test_calls_are_those_that_vllm_reads(models, name):
    parsers = pytest.importorskip("vllm.tool_parsers")
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    request = protocol.ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=[ADD])
    model = models[name]
    parser = parsers.ToolParserManager.get_tool_parser(VLLM[name])(model.tokenizer, request.tools)
    for said in TURNS[name]:
        text = model.tokenizer.decode([each for each in ids(model, said) if each not in model.text.words.stops])
        theirs = parser.extract_tool_calls(text, request=request)
        expected = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
        assert read(model, said)[1] == expected, said


@pytest.mark.parametrize("name", ["hermes", "llama3", "deepseek", "harmony"])
def test_turns_are_those_that_renderers_read(models, name):
    parsing = pytest.importorskip("renderers.parsing")
    model = models[name]
    token = model.tokenizer.convert_tokens_to_ids
    stops = set(model.text.words.stops)
    tagged = {"tool_call_id": token("<tool_call>"), "tool_call_end_id": token("</tool_call>")}
    deep = {f"tool_{part}_id": token(f"<｜tool▁{part.replace('_', '▁')}｜>") for part in ("calls_begin", "calls_end")}
    deep |= {
        f"tool_{part}_id": token(f"<｜tool▁{part.replace('_', '▁')}｜>") for part in ("call_begin", "call_end", "sep")
    }
    harmony = {f"{part}_id": token(f"<|{part}|>") for part in ("return", "call", "start", "end", "channel", "message")}
    parse = {
        "hermes": lambda own: parsing.parse_qwen3(model.tokenizer, own, stop_ids=stops, **tagged),
        "llama3": lambda own: parsing.parse_llama_3(model.tokenizer, own, stop_ids=stops),
        "deepseek": lambda own: parsing.parse_deepseek_v3(model.tokenizer, own, stop_ids=stops, **deep),
        "harmony": lambda own: parsing.parse_gpt_oss(
            model.tokenizer, [*ids(model, "<|start|>assistant"), *own], constrain_id=token("<|constrain|>"), **harmony
        ),
    }
    for said in TURNS[name]:
        theirs = parse[name](ids(model, said))
        expected = [(call.name, call.arguments) for call in theirs.tool_calls if call.status.name == "OK"]
        message, calls = read(model, said)
        if name != "llama3" or len(calls) < 2:  # it takes one call a turn
            assert calls == expected, said
            assert message.reasoning == (theirs.reasoning_content or ""), said
            assert message.content.strip() == theirs.content or not theirs.content, said
