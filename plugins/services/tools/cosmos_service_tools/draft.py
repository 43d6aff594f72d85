"""Writes a recipe of at most forty lines for a model, data, an algorithm and hardware, sized by rules of thumb.

The plan of the recipe says what really fits. Full training takes 16 bytes a parameter (weights, gradients and AdamW in
float32); where that is more than a share of the memory, adapters are trained instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import psutil

from cosmos_core.protocols.algorithm import Source
from cosmos_service_tools.checkpoint import Checkpoint
from cosmos_service_tools.columns import Columns, reference_pattern
from cosmos_service_tools.rows import Data

_TRAINED_BYTES: Final = 16
_GENERATING_BYTES: Final = 2
_SHARE: Final = 0.7
_ASSUMED_GPU_BYTES: Final = 80 << 30
_TINY: Final = 50_000_000
_SMALL: Final = 1_500_000_000
_LR: Final[Mapping[Source, tuple[float, float, float]]] = {
    "demonstrations": (1e-3, 2e-5, 1e-5),
    "rollouts": (3e-4, 2e-6, 1e-6),
    "preferences": (2e-4, 1e-6, 5e-7),
}
"""Learning rates of tiny, small and larger models, all weights trained."""
_ADAPTERS_LR: Final = 10.0
_ROLLOUT_STEPS: Final = 100
_MOST_STEPS: Final = 2000
_CHAT_TEMPLATE: Final = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@attrs.frozen(kw_only=True)
class Hardware:
    """GPUs to train and generate on, none for a CPU; bytes of each (0: not known), and whether GPUs are here at all."""

    num_gpus: int
    gpu_bytes: int = 0
    has_gpus: bool = False

    def __str__(self) -> str:
        """For people: `cpu`, `1 GPU`, `4 GPUs`."""
        return "cpu" if not self.num_gpus else f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"


@attrs.frozen(kw_only=True)
class Choice:
    """Everything that a recipe is written from.

    Attributes:
        path: The recipe's file; its stem names the run.
        task: Name of the algorithm plugin.
        source: Where its batches come from.
        reward: Name of the reward plugin; None where nothing is scored.
        tables: Empty tables of the recipe that the algorithm needs, such as `reference`.
    """

    path: Path
    checkpoint: Checkpoint
    data: Data
    columns: Columns
    task: str
    source: Source
    hardware: Hardware
    reward: str | None = None
    tables: tuple[str, ...] = ()

    @property
    def is_tiny(self) -> bool:
        """True for models that a CPU trains in minutes."""
        return self.checkpoint.num_parameters < _TINY

    @property
    def num_training_gpus(self) -> int:
        """All GPUs, or half of them where the others generate; one does both."""
        number = self.hardware.num_gpus
        return number // 2 if self.source == "rollouts" and number > 1 else number

    @property
    def adapts(self) -> bool:
        """True if all weights are too many to train on this hardware."""
        each = _TRAINED_BYTES + (_GENERATING_BYTES if self.hardware.num_gpus < 2 else 0)
        number = self.num_training_gpus
        held = number * (self.hardware.gpu_bytes or _ASSUMED_GPU_BYTES) if number else psutil.virtual_memory().total
        return self.checkpoint.num_parameters * each > held * _SHARE

    @property
    def num_heldout(self) -> int:
        """Rows of the train split to hold out."""
        return 0 if self.data.has_heldout else min((self.data.num_rows or 1000) // 10, 64)

    @property
    def prompts_per_step(self) -> int:
        """As many as the hardware takes in a while; no more than there are, no fewer than processes share."""
        wanted = 16 if self.hardware.num_gpus or self.is_tiny else 4
        there = (self.data.num_rows or wanted) - self.num_heldout
        return max(min(wanted, there), self.num_training_gpus, 1)

    @property
    def steps(self) -> int:
        """Three passes over few rows, one over many, in bounds; of rollouts a round number."""
        if self.source == "rollouts":
            return _ROLLOUT_STEPS
        rows = (self.data.num_rows or _MOST_STEPS) - self.num_heldout
        passes = 3 if rows < 2000 and self.source == "demonstrations" else 1
        return max(1, min(rows * passes // self.prompts_per_step, _MOST_STEPS))

    @property
    def lr(self) -> float:
        """By size, as it is usual."""
        number = self.checkpoint.num_parameters
        rate = _LR[self.source][0 if self.is_tiny else 1 if number < _SMALL else 2]
        return rate * _ADAPTERS_LR if self.adapts else rate

    @property
    def max_units(self) -> int:
        """Tokens of a completion: room for reasoning on GPUs, half of the context at most."""
        wanted = 64 if self.is_tiny else 1024 if self.hardware.num_gpus else 128
        return min(wanted, self.checkpoint.context_length // 2)


def write(choice: Choice) -> str:
    """The recipe."""
    blocks = [_head(choice), _model(choice), _dataset(choice), _objective(choice), _policy(choice)]
    if choice.source == "rollouts":
        blocks.append(_rollout(choice))
    if choice.data.has_heldout or choice.num_heldout:
        told = "answers to held-out prompts, scored" if choice.source == "rollouts" else "the loss of held-out rows"
        interval = f"interval = {max(choice.steps // 10, 1)}"
        held = f"prompts = {choice.num_heldout or 64}"
        blocks.append(["[evaluation]", _said(interval, f"steps between looks at {told}"), held])
    else:
        words = f"# No [evaluation]: {choice.data.num_rows} rows are too few to hold a tenth out"
        blocks.append([f"{words}; it takes dataset.options.heldout_rows, or a held-out file."])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _said(line: str, comment: str) -> str:
    return f"{line:<34} # {comment}"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    return re.sub(r"e-0?", "e-", f"{value:.0e}")


def _head(choice: Choice) -> list[str]:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", choice.path.stem).strip("-._") or "run"
    return [
        f"# {choice.task} on {choice.hardware}. Options: `cosmos plugins show NAME`; all keys: docs/recipe.md.",
        "[run]",
        f"name = {_toml(name)}",
        f"steps = {choice.steps}",
    ]


def _model(choice: Choice) -> list[str]:
    model = choice.checkpoint
    lines = ["[model]", f"plugin = {_toml(model.plugin)}", f"path = {_toml(model.path)}"]
    if not model.has_tokenizer:
        lines.append(_said('tokenizer = { build = "byte-bpe" }', "made from the rows: the folder has none"))
    if choice.columns.messages is not None and not model.has_template:
        lines += [f"options.chat_template = '''\n{_CHAT_TEMPLATE}'''  # the tokenizer has none"]
    return lines


def _dataset(choice: Choice) -> list[str]:
    columns, options = choice.columns, dict(choice.data.options)
    lines = ["[dataset]", f"plugin = {_toml(choice.data.plugin)}", "[dataset.options]"]
    lines += [f"{key} = {_toml(value)}" for key, value in options.items()]
    if choice.num_heldout:
        of = f" of {choice.data.num_rows}" if choice.data.num_rows else ""
        lines.append(_said(f"heldout_rows = {choice.num_heldout}", f"rows{of} that are not trained on"))
    if columns.messages is not None:
        lines.append(_said(f"messages = {_toml(columns.messages)}", "turns with `role` and `content`"))
    elif choice.checkpoint.has_template and not choice.checkpoint.is_plain:
        lines.append(f"prompt = {_toml(columns.prompt)}")
        lines.append(_said("chat = true", "a user's turn, in the model's own template"))
    else:
        plain = f"prompt = {_toml(str(columns.prompt) + chr(10))}"
        why = "the model learned from plain prompts" if choice.checkpoint.is_plain else "the model has no chat template"
        lines.append(_said(plain, f"as it is: {why}"))
    return [*lines, *_answers(choice)]


def _answers(choice: Choice) -> Iterator[str]:
    columns = choice.columns
    if choice.source == "preferences":
        if columns.messages == columns.chosen and columns.messages is not None:
            yield f"rejected_messages = {_toml(columns.rejected)}"
        else:
            yield f'demonstration = "{{{columns.chosen}}}"'
            yield _said(f'rejected = "{{{columns.rejected}}}"', "worse than the demonstration")
    elif choice.source == "demonstrations" and not columns.answers:
        yield f'demonstration = "{{{columns.completion or columns.reference or columns.chosen}}}"'
    elif choice.source == "rollouts" and columns.reference is not None:
        yield _said(f"reference = {_toml(columns.reference)}", "what rewards compare a completion with")
        if pattern := reference_pattern([row[columns.reference] for row in choice.data.rows]):
            yield _said(f"reference_pattern = {_toml(pattern)}", "the part of it that counts")


def _objective(choice: Choice) -> list[str]:
    lines = ["[algorithm]", f"plugin = {_toml(choice.task)}"]
    lines += [f"[{table}]" for table in choice.tables]
    if choice.reward is not None:
        function = "or a function in a file of yours, as in ./rewards.py:NAME"
        lines += ["[[reward]]", _said(f"plugin = {_toml(choice.reward)}", function)]
        if choice.reward == "exact":
            lines.append(_said("options.ignore_case = true", "the completion is the reference, and nothing else"))
    return lines


def _policy(choice: Choice) -> list[str]:
    gpus = choice.num_training_gpus
    what = "x rollout.group_size completions a step" if choice.source == "rollouts" else "rows a step"
    lines = ["[policy]", _said(f"prompts_per_step = {choice.prompts_per_step}", what)]
    lines.append(_said(f"micro_batch_units = {8192 if gpus else 4096}", "tokens of one forward, at most"))
    lines.append(f'precision = "{"bf16" if gpus else "fp32"}"')
    if gpus > 1:
        lines.append(_said(f"mesh.dp_shard = {gpus}", "GPUs that share weights and batch"))
    if not gpus and choice.hardware.has_gpus:
        lines.append('device = "cpu"')
    lines.append(_said(f"optimizer.lr = {_number(choice.lr)}", "for a model of this size"))
    if choice.adapts:
        lines.append(_said("lora.rank = 16", "adapters: all weights would not fit"))
    return lines


def _rollout(choice: Choice) -> list[str]:
    gpus = choice.hardware.num_gpus
    lines = ["[rollout]"]
    if gpus > 1:
        lines.append(_said(f"replicas = {gpus - choice.num_training_gpus}", "a GPU each, beside those that train"))
    lines.append(_said(f"group_size = {8 if gpus or choice.is_tiny else 4}", "completions of a prompt, compared"))
    lines.append(f'precision = "{"bf16" if gpus else "fp32"}"')
    if not gpus and choice.hardware.has_gpus:
        lines.append('device = "cpu"')
    lines.append(_said(f"sampling.max_units = {choice.max_units}", "tokens of a completion, at most"))
    return lines
