"""A sequence classifier: texts to outputs, in one padded forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, cast

import attrs
import torch
import transformers

from cosmos_core.protocols import Completion
from cosmos_core.types import Message


@attrs.frozen(kw_only=True)
class Classified:
    """The classifier's outputs for one completion.

    Attributes:
        outputs: Each label's logit.
        num_tokens: Tokens that it read.
        num_cut: Tokens that were cut off at the end.
    """

    outputs: tuple[float, ...]
    num_tokens: int
    num_cut: int

    def score(self, label: int, *, sigmoid: bool) -> float:
        """The output of a label, or its sigmoid."""
        output = self.outputs[label]
        if not sigmoid:
            return output
        return 1.0 / (1.0 + math.exp(-output)) if output >= 0 else math.exp(output) / (1.0 + math.exp(output))


class Classifier:
    """A checkpoint's model and tokenizer.

    Args:
        path: Folder or hub name.
        device: As torch names it.
        dtype: As torch names it.
        longest: Most tokens; None for the model's own limit.

    Raises:
        OSError: There is no such checkpoint.
        ValueError: It is no sequence classifier.
        RuntimeError: There is no such device.
    """

    def __init__(self, path: str, *, device: str, dtype: str, longest: int | None) -> None:
        self._device: Final = torch.device(device)
        self._tokenizer: Final[Any] = transformers.AutoTokenizer.from_pretrained(path)
        model, loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, dtype), output_loading_info=True
        )
        if loaded["missing_keys"]:
            missing = ", ".join(sorted(loaded["missing_keys"])[:3])
            raise ValueError(f"the checkpoint has no weights for {missing}; it was not trained to classify")
        self._model: Final[Any] = model.to(self._device).eval()
        self.num_labels: Final = int(model.config.num_labels)
        own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._longest: Final = min(
            each for each in (longest, own, self._tokenizer.model_max_length) if each is not None
        )
        # The model finds the last token of a padded sequence by its config.
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self._tokenizer.pad_token_id

    def classify(self, completions: Sequence[Completion]) -> list[Classified]:
        """Read prompts and completions in one forward; one after another where there is no padding token."""
        pad = self._model.config.pad_token_id
        if pad is None and len(completions) > 1:
            return [classified for each in completions for classified in self.classify([each])]
        tokens = [self._encode(each) for each in completions]
        kept = [each[: self._longest] for each in tokens]
        width = max(1, *map(len, kept))
        ids_BT = torch.full((len(kept), width), 0 if pad is None else pad, dtype=torch.int64)
        mask_BT = torch.zeros((len(kept), width), dtype=torch.int64)
        for row, each in enumerate(kept):
            ids_BT[row, : len(each)] = torch.tensor(each, dtype=torch.int64)
            mask_BT[row, : len(each)] = 1
        with torch.inference_mode():
            answer = self._model(input_ids=ids_BT.to(self._device), attention_mask=mask_BT.to(self._device))
        outputs_BL = answer.logits.float().cpu()
        return [
            Classified(outputs=tuple(outputs), num_tokens=len(short), num_cut=len(whole) - len(short))
            for outputs, short, whole in zip(outputs_BL.tolist(), kept, tokens, strict=True)
        ]

    def _encode(self, completion: Completion) -> list[int]:
        """The tokens of the prompt and what followed it: a chat where the tokenizer has a template, else one text."""
        prompt = completion.prompt.text
        said = completion.turns or (Message(role="assistant", content=completion.text),)
        if self._tokenizer.chat_template is None:
            given = prompt if isinstance(prompt, str) else "\n".join(turn.content for turn in prompt) + "\n"
            return cast("list[int]", self._tokenizer(given + completion.text, verbose=False)["input_ids"])
        before = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        turns = [{"role": turn.role, "content": turn.content} for turn in (*before, *said)]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        # The template writes the special tokens itself.
        return cast("list[int]", self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
