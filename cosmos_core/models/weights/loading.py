"""Configs and weights of Hugging Face models, with their errors told in one line."""

from __future__ import annotations

import copy
import difflib
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import CONFIG_NAME, HF_HUB_CACHE, HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, StrictDataclassError
from huggingface_hub.file_download import repo_folder_name
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from cosmos_core.errors import CheckpointError, ConfigError
from cosmos_core.models.attention.packed import PACKED, attend_packed
from cosmos_core.models.parallel.grouped import GROUPED

_OTHER_FORMATS: Final = ("pytorch_model*.bin", "consolidated*.pth", "*.ckpt", "tf_model.h5", "flax_model.msgpack")
FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The format's names of dtypes of weights."""
BLOCK: Final = 128
"""Rows and columns of a matrix in fp8 that share a scale."""


@attrs.frozen(kw_only=True)
class Stored:
    """A tensor in a file, with the format's name of its dtype, such as `BF16`."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    def check_float(self) -> None:
        """Refuse what is no weight."""
        if self.dtype not in FLOATS:
            raise CheckpointError(
                f"{self.file}: {self.name} has dtype {self.dtype}, and weights are one of {', '.join(sorted(FLOATS))}; "
                "convert the checkpoint"
            )


@attrs.frozen(kw_only=True)
class _Index:
    weight_map: dict[str, str]


def holds_weights(folder: Path, stem: str = "model") -> bool:
    """Tell whether a folder has safetensors files, or an index (called after `stem`) that promises some."""
    return any(folder.glob("*.safetensors")) or (folder / f"{stem}.safetensors.index.json").is_file()


def absence(folder: Path, stem: str = "model") -> str:
    """The message about a folder without weights, of which a run can be planned.

    Raises:
        CheckpointError: It has weights, in another format.
    """
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise CheckpointError(
            f"model.path: {folder} has its weights in {others[0]}, which may hold code and is not read; convert them "
            "to safetensors: save_pretrained of transformers writes it"
        )
    return (
        f"model.path: {folder} holds a config but no weights ({stem}.safetensors or {stem}.safetensors.index.json); "
        "give a checkpoint (--set model.path=...)"
    )


def stored_tensors(folder: Path, stem: str = "model") -> dict[str, Stored]:
    """The tensors of a checkpoint by name.

    Raises:
        CheckpointError: A file is missing or truncated, or does not hold what the index says; it is named.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(absence(folder, stem))
        return _read_header(single)
    places = _read_index(index)
    counts = Counter(places.values())
    for name, count in counts.items():
        if not (folder / name).is_file():
            raise CheckpointError(
                f"model.path: {folder / name} is missing; {index.name} says that it holds {count} of {len(places)} "
                "tensors"
            )
    found = {name: _read_header(folder / name) for name in counts}
    for name, file in places.items():
        if name not in found[file]:
            raise CheckpointError(
                f"model.path: {folder / file} lacks the tensor {name}, which {index.name} says it holds"
            )
    return {name: found[file][name] for name, file in places.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"model.path: {path} is damaged: {error}") from error
    strays = [file for file in places.values() if Path(file).name != file]
    if strays:
        raise CheckpointError(f"model.path: {path} names {strays[0]!r}, which is no file of its folder")
    return places


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with safe_open(path, framework="np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"model.path: {path} is truncated or no safetensors file, with {size:,} bytes: {first_line(error)}"
        ) from error
    return {
        name: Stored(name=name, file=path, shape=tuple(part.get_shape()), dtype=part.get_dtype())
        for name, part in parts.items()
    }


TEMPLATE_ERRORS: Final = (TemplateError, ValueError, TypeError, KeyError)
"""What a chat template raises on turns that it does not take."""

LIBRARY_ERRORS: Final = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    ArithmeticError,
    TypeError,
    ImportError,
    AttributeError,
    StrictDataclassError,
    SafetensorError,
)
"""What transformers and safetensors raise on input that they cannot use."""

EXTRA_KEYS: Final = frozenset(
    {
        *("model_type", "architectures", "dtype", "torch_dtype", "head_dim"),
        *("partial_rotary_factor", "rope_scaling", "rope_theta"),
    }
)
"""Keys that configs take, or models read, without declaring them."""


def first_line(error: BaseException) -> str:
    """The first line of an error, without what the library prints around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(lines[:2]) if lines else type(error).__name__


def config_from_mapping(mapping: Mapping[str, Any]) -> PretrainedConfig:
    """A Hugging Face config from a recipe's `[model.config]`.

    Raises:
        ConfigError: `model_type` is missing or unknown, a key is unknown, or a value does not fit.
    """
    values = dict(mapping)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ConfigError("model.config.model_type: missing; name the architecture, such as 'qwen3'")
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError:
        raise ConfigError(f"model.config.model_type: transformers knows no {model_type!r}") from None
    refuse_unknown(values, default, "model.config")
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **values)
    except LIBRARY_ERRORS as error:
        raise ConfigError(f"model.config: {first_line(error)}") from error
    return config


def refuse_unknown(keys: Iterable[str], known: PretrainedConfig, where: str) -> None:
    """Refuse keys that a config neither has nor takes."""
    for key in keys:
        if key not in EXTRA_KEYS and not hasattr(known, key):
            near = difflib.get_close_matches(key, [name for name in vars(known) if not name.startswith("_")], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{where}.{key}: {type(known).__name__} has no such option{hint}")


def config_from_checkpoint(path: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """The config of a checkpoint, with which a quantised one is read (see `quantised`) as any other.

    Raises:
        ConfigError: There is no usable config, or the weights are quantised in a way that is not read.
    """
    require_folder(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LIBRARY_ERRORS as error:
        absent = "" if Path(path).exists() else f" (there is no folder {path}, so it was taken for a name on the hub)"
        raise ConfigError(f"model.path: no usable model config at {path!r}{absent}: {first_line(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        _check_readable(path, config.quantization_config)
        # Read in bfloat16, it is a model like any other.
        del config.quantization_config
    return config


def _check_readable(path: str, quantised: Any) -> None:
    stated: Mapping[str, Any] = quantised if isinstance(quantised, Mapping) else {}
    method, fmt, block = stated.get("quant_method", "?"), stated.get("fmt", "e4m3"), stated.get("weight_block_size")
    is_read = block == [BLOCK, BLOCK] and fmt == "e4m3" if method == "fp8" else method == "mxfp4"
    if not is_read:
        how = f"{method}, {fmt}, weight_block_size {block}" if method == "fp8" else method
        raise ConfigError(
            f"model.path: the weights of {path!r} are quantised ({how}), which is not read; mxfp4 is, and fp8 as "
            f"e4m3 in blocks of [{BLOCK}, {BLOCK}]. Convert the checkpoint to bfloat16, and remove quantization_config "
            "from its config.json"
        )


def make_shell(
    config: PretrainedConfig, auto_class: Any, *, trust_remote_code: bool, is_packed: bool = True
) -> PreTrainedModel:
    """The module on the meta device, in evaluation mode (no dropout): nothing is allocated."""
    with torch.device("meta"):
        return make(config, auto_class, is_packed=is_packed, trust_remote_code=trust_remote_code).eval()


def make(config: PretrainedConfig, auto_class: Any, *, is_packed: bool, **how: Any) -> PreTrainedModel:
    """The module of a config, on the device of the context; a ConfigError says that it makes none.

    Not packed, it attends with transformers' `eager`, the one of its functions that leaves nothing out.
    """
    how |= {"attn_implementation": PACKED if is_packed else "eager", "experts_implementation": GROUPED}
    # A model owns its config (its attention is set there), so two models never share one.
    try:
        module: PreTrainedModel = auto_class.from_config(copy.deepcopy(config), **how)
    except LIBRARY_ERRORS as error:
        raise ConfigError(f"model: the config makes no model: {first_line(error)}") from error
    if is_packed:
        attend_packed(module)
    return module


def refuse_nonfinite(name: str, values: torch.Tensor, path: str) -> None:
    """Refuse weights of which some are no numbers: nothing could be learned, and no gradient would say why."""
    # Both are not a number if one value is; and nothing as large as the tensor is made to find out.
    if not values.numel() or torch.isfinite(torch.stack(torch.aminmax(values))).all():
        return
    bad = values.numel() - int(torch.isfinite(values).sum())
    raise CheckpointError(
        f"model.path: {path!r} is damaged: {bad:,} of the {values.numel():,} values read of {name} are not finite"
    )


@functools.cache
def require_folder(path: str) -> None:
    """Refuse what is no folder, and is no name on the hub or cannot be looked up there, without retries of a minute.

    A path whose folder is here is none on the hub. What the hub says of a name is left to who reads the files.
    """
    folder = Path(path)
    if (folder / "job.json").is_file():
        raise ConfigError(f"model.path: {path} is a run; cosmos export {path} writes its model, to {folder / 'export'}")
    if folder.is_dir():
        return
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or ("/" in path and folder.parent.is_dir()):
        beside = [each.name for each in folder.parent.iterdir() if each.is_dir()] if folder.parent.is_dir() else []
        near = difflib.get_close_matches(folder.name, beside, 1)
        hint = f"; did you mean {folder.with_name(near[0])}?" if near else ""
        raise ConfigError(f"model.path: no folder {path!r}{hint}")
    if HF_HUB_OFFLINE or Path(HF_HUB_CACHE, repo_folder_name(repo_id=path, repo_type="model")).is_dir():
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, CONFIG_NAME))
    except (HfHubHTTPError, EntryNotFoundError, ValueError):
        return
    except Exception as error:
        raise ConfigError(
            f"model.path: no folder {path!r}, and the hub cannot be asked for a model of that name "
            f"({first_line(error)}); check the path, or the network"
        ) from error
