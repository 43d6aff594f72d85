"""The commands, a tiny model's folder, and rows of questions."""

import json
import shutil

import pytest
import torch
import typer
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from cosmos_core.config.job import Job
from cosmos_core.config.loading import recipe_from, save_job
from cosmos_core.models.tokenizer import build_tokenizer
from cosmos_service_tools.audit import audit
from cosmos_service_tools.chat import chat
from cosmos_service_tools.compare import compare
from cosmos_service_tools.doctor import doctor
from cosmos_service_tools.evaluate import evaluate
from cosmos_service_tools.generate import generate
from cosmos_service_tools.init import init
from cosmos_service_tools.recipes import app
from cosmos_service_tools.samples import samples
from cosmos_service_tools.serve import serve
from cosmos_service_tools.show import show

SIZES = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
CHATML = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def cosmos():
    """Run a command: its output if it succeeds, else what it raises."""
    root = typer.Typer()
    root.add_typer(app, name="recipes")
    root.command("eval")(evaluate)
    for command in (audit, chat, compare, doctor, generate, init, samples, serve, show):
        root.command()(command)

    def run(*arguments, keys=None, code=0):
        result = CliRunner().invoke(root, [str(each) for each in arguments], input=keys)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of tiny models: `chat` has a template of chats, `plain` has none."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES, **HEADS))
    tokenizer = build_tokenizer(["3 + 4"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    tokenizer.add_tokens([AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")])
    for name in ("plain", "chat"):
        tokenizer.chat_template = CHATML if name == "chat" else None
        module.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch, models):
    """An empty folder to work in, with the models, no GPU and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "models").symlink_to(models)
    return tmp_path


@pytest.fixture
def plain_export(here):
    """The export, with a template of chats, of a run that learned from plain prompts."""
    recipe = recipe_from(
        {
            "model": {"plugin": "hf", "path": "models/chat"},
            "algorithm": {"plugin": "sft"},
            "dataset": {"plugin": "jsonl"},
            "policy": {"optimizer": {"lr": 1e-6}, "prompts_per_step": 2},
            "run": {"name": "mine", "steps": 1},
        }
    )
    save_job(Job(run_id="1", directory=here / "mine", recipe_directory=here, recipe=recipe, is_plain=True))
    return shutil.copytree(here / "models/chat", here / "mine/export")


@pytest.fixture
def rows(here):
    """Write rows to a file of JSON lines, by its name."""

    def write(name, *listed):
        (here / name).write_text("".join(f"{json.dumps(row)}\n" for row in listed))
        return name

    return write
