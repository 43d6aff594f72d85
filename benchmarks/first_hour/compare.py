"""The first job of a newcomer, here and with TRL: own data, own reward, own tiny model, SFT for 35 steps, GRPO for 60.

    python benchmarks/first_hour/compare.py --trl .venv-trl/bin/python [--rounds 3]

`cosmos.toml` and `cosmos_job.py` are the job here, `trl_job.py` is it with TRL, in an environment of its own:

    python -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 && .venv-trl/bin/pip install trl

All three read the model that this script makes (0.1 M parameters, random weights) and `sums.py`. Each is timed as a
whole process, start and end included, in turns; what each model then answers is scored alike, by transformers. All
compute in float32. The modules of this checkout are compiled first, as pip compiles those of TRL when it installs them.
"""

from __future__ import annotations

import argparse
import compileall
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

HERE: Final = Path(__file__).parent
OURS: Final = ("cosmos.toml", "cosmos_job.py")


def main() -> None:
    """Time the jobs in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python of an environment with TRL; without it, only the jobs here are timed")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    jobs = [*OURS, *(["trl_job.py"] if given.trl else [])]
    seconds: dict[str, list[float]] = {job: [] for job in jobs}
    right: dict[str, list[float]] = {job: [] for job in jobs}
    for name in ("cosmos_core", "plugins"):
        compileall.compile_dir(HERE.parents[1] / name, quiet=1)
    with tempfile.TemporaryDirectory() as made:
        make_model(Path(made) / "tiny")
        for _ in range(given.rounds):
            for job in jobs:
                with tempfile.TemporaryDirectory() as place:
                    folder = Path(place)
                    shutil.copytree(Path(made) / "tiny", folder / "tiny")
                    for name in ("sums.py", job):
                        shutil.copy(HERE / name, folder)
                    began = time.perf_counter()
                    run(job, folder, given.trl)
                    seconds[job].append(time.perf_counter() - began)
                    right[job].append(score(trained(job, folder)))
    print("| job | lines | seconds, median (all) | of TRL's | right answers |\n|---|---|---|---|---|")
    for job in jobs:
        lines = [line for line in (HERE / job).read_text().splitlines() if line.strip()]
        every = ", ".join(f"{each:.1f}" for each in seconds[job])
        ratio = f"{median(seconds[job]) / median(seconds['trl_job.py']):.2f}" if given.trl else ""
        print(f"| {job} | {len(lines)} | {median(seconds[job]):.1f} ({every}) | {ratio} | {median(right[job]):.2f} |")


def run(job: str, folder: Path, trl: str | None) -> None:
    """Run a job as a whole process."""
    if job.endswith(".toml"):
        command = [sys.executable, "-m", "cosmos_core.cli", "run", job]
    else:
        command = [trl if job.startswith("trl") and trl else sys.executable, job]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{job} failed:\n{done.stdout}\n{done.stderr}")


def trained(job: str, folder: Path) -> Path:
    """The folder of the model that a job has trained, in Hugging Face's format."""
    if job.startswith("trl"):
        return folder / "trained"
    (directory,) = (folder / "runs").iterdir()
    command = [sys.executable, "-m", "cosmos_core.cli", "export", str(directory)]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    return directory / "export"


def make_model(folder: Path) -> None:
    """A model of random weights, with a tokenizer of digits."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from cosmos_core.models.tokenizer import build_tokenizer, tokenizer_defaults

    tokenizer = build_tokenizer(["0+1=2 3 4 5 6 7 8 9"], {"vocab_size": 280, "split_digits": True})
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        initializer_range=0.06,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        **tokenizer_defaults(tokenizer),
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def score(folder: Path) -> float:
    """The share of right answers among all sums of two digits, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    inputs = tokenizer([f"{a}+{b}=" for a, b in pairs], return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == str(a + b) for text, (a, b) in zip(texts, pairs, strict=True)) / len(pairs)


if __name__ == "__main__":
    main()
