"""Writes GSM8K as files that recipes/gsm8k.toml reads, from the public dataset `openai/gsm8k` on Hugging Face's hub.

Run it as: python recipes/data/gsm8k.py FOLDER
"""  # noqa: INP001 - a script beside the files of the recipes

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

SPLITS: Final = {"train-2000": "train[:2000]", "test": "test"}


def main() -> None:
    """Write `train-2000.jsonl`, the first 2,000 rows of the train split, and `test.jsonl`, all of the test split."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    from datasets import load_dataset  # noqa: PLC0415 - of cosmos-dataset-huggingface

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in SPLITS.items():
        rows = load_dataset("openai/gsm8k", "main", split=split)
        rows.to_json(folder / f"{name}.jsonl")
        print(f"{folder / name}.jsonl: {len(rows)} rows")  # noqa: T201 - it is what the script is for


if __name__ == "__main__":
    main()
