"""A look at a model without loading it: its family, size, context, chat template and tokenizer, from small files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.config.loading import run_of
from cosmos_core.config.problems import nearest
from cosmos_core.errors import ConfigError

_HUB_NAME: Final = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")
_TIMEOUT_S: Final = 5.0
_PLUGINS: Final[Mapping[str, str]] = {
    "llama": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen3-moe",
    "deepseek_v3": "deepseek",
    "qwen2_5_vl": "qwen-vl",
    "qwen3_vl": "qwen-vl",
}
"""First-party plugins by the `model_type` of a config; `hf` takes any."""
_ASSUMED_PARAMETERS: Final = 1_000_000_000
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", re.IGNORECASE)
"""A size in a model's name, such as `Qwen3-0.6B`."""
_ASSUMED_CONTEXT: Final = 4096


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A model as its files describe it; what they do not say is assumed.

    Attributes:
        path: As the recipe names it.
        plugin: The plugin of its family, `hf` where there is none.
        num_parameters: About how many it has.
        context_length: Tokens of prompt and completion together.
        has_template: Whether its tokenizer has a template of chats.
        has_tokenizer: Whether there is one.
        is_plain: Whether it is an export of a run that learned from plain prompts.
        unreached: Why its files could not be looked at, so that all of this is assumed; empty if they could.
    """

    path: str
    plugin: str = "hf"
    num_parameters: int = _ASSUMED_PARAMETERS
    context_length: int = _ASSUMED_CONTEXT
    has_template: bool = True
    has_tokenizer: bool = True
    is_plain: bool = False
    unreached: str = ""


def look_at_model(name: str) -> Checkpoint:
    """Look at a folder, or a name on the Hub, from which nothing but small files is fetched.

    Raises:
        ConfigError: There is no such folder, it is no language model of Hugging Face's, or the Hub has no such model.
    """
    if "://" in name:
        return _assumed(name, "models in a store are fetched when the run is planned")
    folder = Path(name).expanduser()
    if folder.is_dir():
        found = _described(name, lambda file: _read(folder / file), lambda file: (folder / file).is_file())
        run = run_of(folder)
        return attrs.evolve(found, is_plain=run is not None and run.is_plain)
    if folder.exists():
        raise ConfigError(f"model {name}: a file; give the folder that it is in, or a name on the Hugging Face Hub")
    if not _HUB_NAME.fullmatch(name) or (folder.parent != Path() and folder.parent.is_dir()):
        raise ConfigError(f"model {name}: no such folder{_similar(folder)}")
    found = _on_hub(name)
    if found.unreached and (similar := _similar(folder)):
        raise ConfigError(f"model {name}: no such folder{similar} As a name on the Hub: {found.unreached}")
    return found


def _similar(folder: Path) -> str:
    names = [each.name for each in folder.parent.iterdir() if each.is_dir()] if folder.parent.is_dir() else []
    close = nearest(folder.name, names)
    return f"; did you mean {folder.with_name(close[0])}?" if close else ""


def _on_hub(name: str) -> Checkpoint:
    """A model on the Hub, or in its cache; where that cannot be reached, this is told in seconds."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError  # noqa: PLC0415
    from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415

    if isinstance(try_to_load_from_cache(name, "config.json"), str):

        def path(file: str) -> Path | None:
            cached = try_to_load_from_cache(name, file)
            return Path(cached) if isinstance(cached, str) else None
    else:
        if constants.HF_HUB_OFFLINE:
            return _assumed(name, "HF_HUB_OFFLINE is set, and it is not in the cache")
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_TIMEOUT_S)
        except GatedRepoError:
            return _assumed(name, "the Hub asks who you are: accept its terms, then `hf auth login`")
        except RepositoryNotFoundError:
            raise ConfigError(
                f"model {name}: no such folder, and the Hub has no such model, or a private one; check the name, or "
                "`hf auth login`"
            ) from None
        except EntryNotFoundError:
            raise ConfigError(f"model {name}: no language model: it has no config.json on the Hub") from None
        except Exception as error:  # noqa: BLE001 - each release of the library has errors of another HTTP client
            return _assumed(name, f"the Hub cannot be reached ({str(error).splitlines()[0]:.100})")

        def path(file: str) -> Path | None:
            try:
                return Path(hf_hub_download(name, file))
            except EntryNotFoundError:
                return None

    return _described(name, lambda file: _read(path(file)), lambda file: path(file) is not None)


def _assumed(name: str, why: str) -> Checkpoint:
    """A model whose files are out of reach; its name may say its size."""
    size = _SIZE.search(name)
    number = _ASSUMED_PARAMETERS if size is None else int(float(size[1]) * (1e9 if size[2] in "bB" else 1e6))
    return Checkpoint(path=name, num_parameters=number, unreached=why)


def _read(path: Path | None) -> Any:
    """A JSON file, or a text; None if there is none."""
    try:
        text = "" if path is None else path.read_text(encoding="utf-8")
        return (json.loads(text) if path is not None and path.suffix == ".json" else text) or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _described(name: str, read: Callable[[str], Any], has: Callable[[str], bool]) -> Checkpoint:
    config = read("config.json")
    if not isinstance(config, Mapping):
        world = has("model_index.json")
        found = (
            "a diffusion model; `cosmos recipes list` has recipes of world models" if world else "has no config.json"
        )
        if has("job.json"):
            found = f"a run; `cosmos export {name}` writes its model, to {name}/export"
        raise ConfigError(f"model {name}: no language model of Hugging Face's: {found}")
    settings = read("tokenizer_config.json")
    # The first is small; the others are fetched only where it is absent.
    has_tokenizer = settings is not None or any(has(file) for file in _TOKENIZERS)
    templates = (
        settings.get("chat_template") if isinstance(settings, Mapping) else None,
        read("chat_template.jinja"),
        read("chat_template.json"),
    )
    text = config.get("text_config") or config
    try:
        number = _num_parameters(text, tied=bool(config.get("tie_word_embeddings")))
        context_length = int(text.get("max_position_embeddings") or _ASSUMED_CONTEXT)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"model {name}: config.json is no config of a model: {error}") from error
    return Checkpoint(
        path=name,
        plugin=_PLUGINS.get(str(config.get("model_type")), "hf"),
        num_parameters=number,
        context_length=context_length,
        has_template=any(templates),
        has_tokenizer=has_tokenizer,
    )


def _num_parameters(config: Mapping[str, Any], *, tied: bool) -> int:
    """About as many as a decoder of this config has: attention, gated feed-forward, embeddings."""
    hidden = int(config.get("hidden_size") or 0)
    layers = int(config.get("num_hidden_layers") or 0)
    if not hidden or not layers:
        return _ASSUMED_PARAMETERS
    heads = int(config.get("num_attention_heads") or 1)
    width = heads * int(config.get("head_dim") or hidden // heads)
    kept = int(config.get("num_key_value_heads") or heads) / heads
    experts = int(config.get("num_experts") or config.get("n_routed_experts") or 1)
    wide = int((config.get("moe_intermediate_size") if experts > 1 else config.get("intermediate_size")) or 4 * hidden)
    layer = 2 * hidden * width * (1 + kept) + 3 * hidden * wide * experts
    return int(layers * layer + hidden * int(config.get("vocab_size") or 0) * (1 if tied else 2))


def relative(path: str, recipe: Path) -> str:
    """A local path as a recipe names it: beside the recipe where it lies below that folder, else absolute."""
    folder, target = recipe.parent.absolute(), Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100
    return os.path.relpath(target, folder) if target.is_relative_to(folder) else str(target)
