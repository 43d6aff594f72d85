import json
import os

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from cosmos_core.errors import ConfigError, CosmosError, DataError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload, values
from cosmos_core.models.parallel.stages import cut
from cosmos_core.protocols import Layout, ModelContext
from cosmos_core.types import Message, Prompt

CPU = torch.device("cpu")
CORPUS = [f"Ann has {n} apples and buys {n + 3} more. How many?\n{n}+{n + 3}={2 * n + 3}" for n in range(40)]
TOKENIZER = {"build": "byte-bpe", "vocab_size": 280, "split_digits": True, "corpus_rows": 40}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ tail }}"
)


def make(tmp_path, config, **options):
    context = ModelContext(path=None, config=config, assets=tmp_path / "assets")
    return HuggingFaceModel(HuggingFaceOptions(**options), context)


@pytest.fixture
def prepared(tmp_path, config):
    config["vocab_size"] = 320
    model = make(tmp_path, config)
    model.prepare(CORPUS, TOKENIZER)
    return model


def build(model, seed=0):
    return model.build(seed=seed, dtype=torch.float32, device=CPU)


def test_facts_of_a_prepared_model(prepared):
    facts = prepared.facts()
    assert facts.vocab_size == 320
    assert facts.tokenizer_size == 280
    assert facts.context_length == 128
    assert facts.stop_ids == {2}
    assert facts.pad_id == 0


def test_facts_give_both_sizes_where_the_vocabulary_is_too_small(tmp_path, config):
    model = make(tmp_path, {**config, "vocab_size": 270})
    model.prepare(CORPUS, TOKENIZER)
    assert (model.facts().vocab_size, model.facts().tokenizer_size) == (270, 280)


def test_a_config_without_vocabulary_takes_the_tokenizers(tmp_path, config):
    del config["vocab_size"]
    model = make(tmp_path, config)
    model.prepare(CORPUS, TOKENIZER)
    saved = json.loads((tmp_path / "assets" / "config.json").read_text())
    assert (saved["vocab_size"], saved["eos_token_id"], saved["pad_token_id"]) == (280, 2, 0)
    # Another process finds the same.
    assert make(tmp_path, config).facts() == model.facts()


def test_a_prompt_without_tokens_is_refused(subtests, tmp_path, config):
    for number, text in enumerate(["", (Message(role="user", content="7?"),)]):
        with subtests.test(text=text):
            folder = tmp_path / str(number)
            folder.mkdir()
            model = make(folder, config, chat_template="{{ tail }}")
            model.prepare(CORPUS, TOKENIZER)
            with pytest.raises(DataError, match="encodes to no tokens"):
                model.encode(Prompt(text=text))


def test_a_chat_goes_through_the_template(tmp_path, config):
    model = make(tmp_path, config, chat_template=TEMPLATE, chat_template_options={"tail": "!"})
    model.prepare(CORPUS, TOKENIZER)
    payload = model.encode(
        Prompt(text=(Message(role="system", content="Be brief."), Message(role="user", content="7?")))
    )
    text = model.tokenizer.decode(values(payload, "prompt").tolist())
    assert text == "<system>Be brief.<user>7?<assistant>!"


def test_of_several_templates_the_default_is_taken(prepared):
    prepared.tokenizer.chat_template = {"default": "{{ messages[0].content }}!", "tool_use": "tools"}
    payload = prepared.encode(Prompt(text=(Message(role="user", content="7?"),)))
    assert prepared.tokenizer.decode(values(payload, "prompt").tolist()) == "7?!"


def test_a_chat_without_a_template_says_what_to_do(prepared):
    with pytest.raises(DataError, match=r"set model\.options\.chat_template"):
        prepared.encode(Prompt(text=(Message(role="user", content="7?"),)))


def test_a_template_that_fails_is_a_data_error(tmp_path, config):
    model = make(tmp_path, config, chat_template="{{ raise_exception('only one user turn') }}")
    model.prepare(CORPUS, TOKENIZER)
    with pytest.raises(DataError, match="only one user turn"):
        model.encode(Prompt(text=(Message(role="user", content="7?"),)))


def test_two_modules_of_one_model_share_no_config(prepared):
    first, second = build(prepared), build(prepared)
    first.set_attn_implementation("sdpa")
    assert second.config._attn_implementation == "cosmos_packed"


def test_initializer_range_is_respected(tmp_path, config):
    for initializer_range in (0.02, 0.3):
        weight = build(make(tmp_path, {**config, "initializer_range": initializer_range})).model.embed_tokens.weight
        assert weight.std().item() == pytest.approx(initializer_range, rel=0.1)


def test_an_exported_tokenizer_loads_anywhere(prepared, tmp_path):
    prepared.export(build(prepared), tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    text = "Ann has 1234 apples, Zoë none"
    assert tokenizer(text)["input_ids"] == prepared.tokenizer(text)["input_ids"]
    assert tokenizer.eos_token_id == 2


def test_a_bad_checkpoint_is_one_clear_error(subtests, prepared, tmp_path):
    for number, damage in enumerate(
        ["missing folder", "no config", "no weights", "truncated", "wrong shape", "lacks one"]
    ):
        with subtests.test(damage=damage):
            here = tmp_path / str(number)
            here.mkdir()
            folder = here / "export"
            prepared.export(build(prepared), folder)
            weights = folder / "model.safetensors"
            match damage:
                case "missing folder":
                    folder = here / "nowhere"
                case "no config":
                    (folder / "config.json").unlink()
                case "no weights":
                    weights.unlink()
                case "truncated":
                    weights.write_bytes(weights.read_bytes()[:5000])
                case "wrong shape":
                    config = json.loads((folder / "config.json").read_text())
                    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
                case "lacks one":
                    tensors = load_file(weights)
                    del tensors["model.layers.1.mlp.up_proj.weight"]
                    save_file(tensors, weights, metadata={"format": "pt"})
            model = HuggingFaceModel(
                HuggingFaceOptions(), ModelContext(path=str(folder), config=None, assets=here / "none")
            )
            with pytest.raises(CosmosError) as caught:
                build(model)
            message = str(caught.value)
            if damage == "no weights":
                assert model.facts().num_layers == 2  # a config is enough to plan
                assert model.facts().absent_weights == message
            else:
                with pytest.raises(CosmosError) as planned:
                    model.facts()
                assert str(folder) in str(planned.value)
            assert str(folder) in message
            assert "Traceback" not in message
            assert "\n" not in message
            if damage == "lacks one":
                assert "model.layers.1.mlp.up_proj.weight" in message


def test_an_export_has_the_dtypes_of_the_checkpoint(prepared, tmp_path):
    # Of a model from a config, that of the config.
    drawn = make(tmp_path, {**prepared.context.config, "dtype": "bfloat16"})
    (tmp_path / "assets" / "config.json").unlink()
    folder = tmp_path / "checkpoint"
    assert drawn.export(build(drawn), folder) == [torch.bfloat16]
    file = folder / "model.safetensors"
    norm = "model.norm.weight"
    stored = {name: each.float() if name == norm else each for name, each in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    # What a config says of its weights need not be so.
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))

    model = HuggingFaceModel(HuggingFaceOptions(), ModelContext(path=str(folder), config=None, assets=tmp_path / "no"))
    module = build(model)
    assert model.export(module, tmp_path / "export") == [torch.bfloat16, torch.float32]
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: each.dtype for name, each in written.items()} == {name: each.dtype for name, each in stored.items()}
    assert all(torch.equal(each, stored[name]) for name, each in written.items())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_is_as_open_as_any_file_of_its_writer(prepared, tmp_path):
    before = os.umask(0o027)
    try:
        prepared.export(build(prepared), tmp_path / "export")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "export").iterdir()}
    assert modes["model.safetensors"] == 0o640
    assert set(modes.values()) == {0o640}


def test_a_bad_config_is_refused(subtests, tmp_path, config):
    for number, (change, message) in enumerate(
        [
            ({"hiden_size": 3}, "model.config.hiden_size: .*did you mean hidden_size"),
            ({"model_type": "qwen33"}, "knows no 'qwen33'"),
            ({"model_type": None}, "model_type: missing"),
            ({"hidden_size": "x"}, "model.config: .*hidden_size"),
            ({"model_type": "vit"}, "model"),
        ]
    ):
        with subtests.test(change=change, message=message):
            folder = tmp_path / str(number)
            folder.mkdir()
            model = make(folder, {**({} if change.get("model_type") == "vit" else config), **change})
            with pytest.raises(ConfigError, match=message):
                build(model)


def test_what_is_missing_is_told(tmp_path, config):
    with pytest.raises(ConfigError, match="give path"):
        build(make(tmp_path, None))

    with pytest.raises(DataError, match=r"add \[model.tokenizer\]"):
        make(tmp_path, config).encode(Prompt(text="x"))


def test_a_damaged_tokenizer_is_a_data_error(prepared, tmp_path, config):
    (tmp_path / "assets" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"no usable tokenizer .*copy a tokenizer's files there"):
        make(tmp_path, config).encode(Prompt(text="x"))


class Llama(HuggingFaceModel):
    model_types = frozenset({"llama"})
    turn_end = "<|turn|>"
    stop_tokens = ("<|turn|>", "<|end|>")
    turn_template = TEMPLATE


def llama(tmp_path, config, **options):
    context = ModelContext(path=None, config={**config, "model_type": "llama"}, assets=tmp_path / "assets")
    model = Llama(HuggingFaceOptions(**options), context)
    model.prepare(CORPUS, TOKENIZER)
    return model


def test_a_subclass_takes_its_own_families_only(tmp_path, config):
    model = Llama(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path))
    with pytest.raises(ConfigError, match="'qwen3' is not one of this plugin's: llama"):
        build(model)


def test_a_tokenizer_without_the_familys_stop_tokens_stops_at_its_own(tmp_path, config):
    assert llama(tmp_path, config).facts().stop_ids == {2}


def test_a_chat_template_of_the_recipe_comes_before_the_familys(tmp_path, config):
    chat = Prompt(text=(Message(role="user", content="7?"),))
    for options, expected in (({}, "<user>7?<assistant>"), ({"chat_template": "[{{ messages[0].content }}]"}, "[7?]")):
        model = llama(tmp_path, config, **options)
        assert model.tokenizer.decode(values(model.encode(chat), "prompt").tolist()) == expected


def test_stop_tokens_of_a_checkpoints_generation_config_count(prepared, tmp_path):
    prepared.export(build(prepared), tmp_path / "export")
    (tmp_path / "export" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = HuggingFaceModel(
        HuggingFaceOptions(), ModelContext(path=str(tmp_path / "export"), config=None, assets=tmp_path / "none")
    )
    assert model.facts().stop_ids == {2, 7, 9}


def test_what_is_encoded_is_decoded(prepared):
    text = "Zoë has 1234 bäume\t😀\n"
    payload = prepared.encode_demonstration(Prompt(text="12+34", demonstration=text))
    assert prepared.decode(payload) == text
    assert len(values(payload, "prompt")) == 5
    assert values(payload, "completion")[-1] == 2

    ids = values(prepared.encode(Prompt(text="Ann has")), "prompt").tolist()
    assert prepared.tokenizer.decode(ids) == "Ann has"
    assert "completion" not in prepared.encode(Prompt(text="Ann has")).arrays

    assert prepared.decode(tokens_payload([5], [2, 2])) == ""


class TwoProcesses:
    """Of a mesh with a pipeline of two; cutting asks for nothing else."""

    def __init__(self, place):
        self.at = place

    def size(self, axis):
        return 2 if axis == "pp" else 1

    def place(self, axis):
        return self.at if axis == "pp" else 0


def test_stages_one_after_the_other_give_what_the_whole_model_gives(subtests, tmp_path, config):
    for multiple in [1, 8]:
        for number, is_tied in enumerate([True, False]):
            with subtests.test(multiple=multiple, is_tied=is_tied):
                folder = tmp_path / f"{multiple}-{number}"
                folder.mkdir()
                model = make(folder, {**config, "tie_word_embeddings": is_tied})
                module = build(model)
                payloads = [tokens_payload([1, 2, 3], [4, 5]), tokens_payload([6], [7, 8, 9, 10])]
                (batch,) = model.pack(payloads, budget=32, multiple=multiple)
                first, last = (cut(module, Layout(mesh=TwoProcesses(place)))[0] for place in (0, 1))

                assert model.stages(module) == [module]
                passed = model.advance(first, batch, None)
                assert passed.shape == (batch.num_units, 16)
                decided = model.conclude(last, batch, passed, temperature=0.7, with_entropy=True)
                expected = model.decide(module, batch, temperature=0.7, with_entropy=True)
                assert decided.logprobs_N.equal(expected.logprobs_N)
                assert decided.entropy_N.equal(expected.entropy_N)


def test_positions_of_several_rotary_axes_go_with_the_row(tmp_path, config):
    """A model of text whose positions are given three times, as models of images have them."""

    class Axes(HuggingFaceModel):
        def text_positions(self, lengths):
            return super().text_positions(lengths).expand(3, -1)

        def hidden(self, module, row, received=None):
            assert row.positions_U.shape == (3, len(row.tokens_U))
            return super().hidden(module, attrs.evolve(row, positions_U=row.positions_U[0]), received)

    build(Axes(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path)))


def test_trusted_code_makes_no_model_of_a_family_that_transformers_has(tmp_path, prepared):
    prepared.export(build(prepared), tmp_path / "own")
    path = tmp_path / "own" / "config.json"
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": classes}))
    (tmp_path / "own" / "own.py").write_text("raise RuntimeError('this code ran')\n")

    class Family(HuggingFaceModel):
        model_types = frozenset({"qwen3"})

    context = ModelContext(path=str(tmp_path / "own"), config=None, assets=tmp_path / "assets", trust_remote_code=True)
    model = Family(HuggingFaceOptions(), context)
    assert model.facts().architecture == "Qwen3ForCausalLM"
    build(model)
