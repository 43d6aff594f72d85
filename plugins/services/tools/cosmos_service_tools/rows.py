"""A look at data: the first rows, about how many there are, and the options with which a dataset plugin reads them."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.data import JsonLinesFile
from cosmos_core.errors import ConfigError, DataError
from cosmos_service_tools.checkpoint import relative

_LOOKED_AT: Final = 50
_PARQUET: Final = (".parquet", ".pq")
_SUFFIXES: Final = (".jsonl", *_PARQUET, ".json", ".csv")
_SAVED: Final = ("dataset_dict.json", "dataset_info.json", "state.json")
_HELDOUT: Final = re.compile(r"(test|valid|validation|eval|dev|heldout|held-out)([^a-z]|$)", re.IGNORECASE)
_HUB_NAME: Final = re.compile(r"(?P<name>[\w][\w.-]*/[\w][\w.-]*)(:(?P<config>[\w.-]+))?")
_TIMEOUT_S: Final = 5.0
_SPLITS: Final = ("test", "validation", "valid", "eval", "dev")


@attrs.frozen(kw_only=True)
class Data:
    """Rows and where they are.

    Attributes:
        plugin: The dataset plugin that reads them.
        options: Its options that say where they are.
        rows: The first of the train split.
        num_rows: Of the train split; None if that is not known without reading all of it.
        has_heldout: Whether the options name a held-out split.
    """

    plugin: str
    options: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    num_rows: int | None = None
    has_heldout: bool = False


def look_at_data(name: str, recipe: Path) -> Data:
    """Look at a file, a folder of files, a folder of `save_to_disk`, or `NAME` or `NAME:CONFIG` on the Hub.

    Args:
        name: As the user typed it.
        recipe: The recipe's file, at whose folder relative paths start.

    Raises:
        ConfigError: There is nothing, it cannot be read (a line is named), it is empty, or the Hub is out of reach.
    """
    path = Path(name).expanduser()
    try:
        if path.is_file():
            data = _of_files([path], [], relative(name, recipe), None)
        elif path.is_dir():
            data = _of_folder(path, relative(name, recipe))
        elif (match := _HUB_NAME.fullmatch(name)) and path.suffix not in _SUFFIXES and not path.parent.is_dir():
            data = _on_hub(match["name"], match["config"])
        else:
            raise ConfigError(f"data {name}: no such file or folder, and no name on the Hub (ORGANISATION/NAME)")
    except (OSError, UnicodeDecodeError, DataError) as error:
        raise ConfigError(f"data {name}: cannot be read: {error}") from error
    if not data.rows:
        raise ConfigError(f"data {name}: empty: it has no rows")
    return data


def _of_folder(folder: Path, place: str) -> Data:
    if any((folder / name).is_file() for name in _SAVED):
        return _saved(folder, place)
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    suffixes = {path.suffix for path in files}
    if len(suffixes) != 1:
        found = f"files of several kinds ({', '.join(sorted(suffixes))}); name one" if files else "none"
        raise ConfigError(f"data {folder}: a folder of {', '.join(_SUFFIXES)} files is wanted, and it has {found}")
    (suffix,) = suffixes
    heldout = [path for path in files if _HELDOUT.match(path.stem)]
    train = [path for path in files if path not in heldout]
    if not train:
        raise ConfigError(f"data {folder}: each of its files is named as a held-out split; name a train file, too")
    pattern = f"*{suffix}" if not heldout else f"train*{suffix}"
    if len(train) > 1 and not all(path.match(pattern) for path in train):
        raise ConfigError(f"data {folder}: beside {heldout[0].name}, name the train files {pattern}")
    named = f"{place}/{train[0].name if len(train) == 1 else pattern}"
    return _of_files(train, heldout, named, f"{place}/{heldout[0].name}" if heldout else None)


def _of_files(train: Sequence[Path], heldout: Sequence[Path], named: str, held: str | None) -> Data:
    """Files of one kind, and the patterns by which a recipe names them."""
    first = train[0]
    if first.suffix not in _SUFFIXES:
        raise ConfigError(f"data {first}: not a kind of file that is read: {', '.join(_SUFFIXES)}")
    if first.stat().st_size == 0:
        raise ConfigError(f"data {first}: empty: it has no rows")
    as_list = first.suffix == ".json" and first.read_bytes().lstrip()[:1] == b"["
    if first.suffix == ".csv" or as_list:
        builder = first.suffix.removeprefix(".")
        files = {"train": [named], **({"heldout": [held]} if held else {})}
        rows = [*itertools.chain.from_iterable(_table(path) for path in train)]
        options = {"path": builder, "data_files": files, **({"heldout_split": "heldout"} if held else {})}
        return Data(
            plugin="huggingface",
            options=options,
            rows=rows[:_LOOKED_AT],
            num_rows=len(rows),
            has_heldout=bool(heldout),
        )
    options = {"train": named, **({"heldout": held} if held else {})}
    look = _parquet if first.suffix in _PARQUET else _lines
    counts = [look(path) for path in train]
    return Data(
        plugin="jsonl",
        options=options,
        rows=[*itertools.chain.from_iterable(rows for rows, _ in counts)][:_LOOKED_AT],
        num_rows=sum(count for _, count in counts),
        has_heldout=bool(heldout),
    )


def _lines(path: Path) -> tuple[list[Mapping[str, Any]], int]:
    """The first rows of JSON lines, and the number of all."""
    file = JsonLinesFile(path)
    rows = []
    for found in itertools.islice(file.scan(), _LOOKED_AT):
        if found.problem or not isinstance(found.row, Mapping):
            what = found.problem or f"a row is an object of named fields, not a {type(found.row).__name__}"
            hint = "; a list of rows over several lines is read from a .json file" if found.row == [] else ""
            raise ConfigError(f"data {path}: line {found.line}: {what}{hint}")
        rows.append(found.row)
    return rows, sum(1 for _ in file.places())


def _parquet(path: Path) -> tuple[list[Mapping[str, Any]], int]:
    try:
        from pyarrow import parquet  # noqa: PLC0415 - an extra of the dataset's distribution
    except ImportError:
        raise ConfigError(
            f"data {path}: Parquet files need pyarrow; run: pip install 'cosmos-dataset-jsonl[parquet]'"
        ) from None
    try:
        file = parquet.ParquetFile(path)
        batches = itertools.islice(file.iter_batches(batch_size=_LOOKED_AT), 1)
        return [row for batch in batches for row in batch.to_pylist()], file.metadata.num_rows
    except ValueError as error:
        raise ConfigError(f"data {path}: no readable Parquet file: {error}") from error


def _table(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a CSV file, whose first line has the names of the columns, or of a JSON list."""
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            try:
                yield from reader
            except csv.Error as error:
                raise ConfigError(f"data {path}: line {reader.line_num}: no CSV: {error}") from error
        return
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise ConfigError(f"data {path}: JSON that is too deep to be read") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"data {path}: line {error.lineno}: no JSON: {error.msg} at column {error.colno}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"data {path}: row {number} is no object of named fields, but a {type(row).__name__}")
        yield row


def _datasets(name: object) -> Any:
    try:
        import datasets  # noqa: PLC0415 - of the dataset plugin's distribution
    except ImportError:
        raise ConfigError(
            f"data {name}: needs the library datasets; run: pip install cosmos-dataset-huggingface"
        ) from None
    return datasets


def _saved(folder: Path, place: str) -> Data:
    saved = _datasets(folder).load_from_disk(str(folder))
    return _of_splits(place, None, saved if isinstance(saved, dict) else {"train": saved})


def _on_hub(name: str, config: str | None) -> Data:
    """The first rows of a dataset on the Hub; where it cannot be reached, this is told in seconds."""
    from huggingface_hub import HfApi, constants  # noqa: PLC0415
    from huggingface_hub.errors import RepositoryNotFoundError  # noqa: PLC0415

    datasets = _datasets(name)
    try:
        if not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(name, timeout=_TIMEOUT_S)
        return _of_splits(name, config, datasets.load_dataset(name, config, streaming=not constants.HF_HUB_OFFLINE))
    except RepositoryNotFoundError:
        raise ConfigError(f"data {name}: no such file or folder, and the Hub has no such dataset") from None
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"data {name}: its columns cannot be looked at on the Hub: {' '.join(str(error).split()):.300}; try again "
            "when it can be reached, write NAME:CONFIG where it has several configurations, or give a file"
        ) from error


def _of_splits(name: str, config: str | None, splits: Mapping[str, Any]) -> Data:
    split = "train" if "train" in splits else next(iter(splits))
    heldout = next((each for each in _SPLITS if each in splits and each != split), None)
    options: dict[str, Any] = {"path": name}
    options |= {"name": config} if config else {}
    options |= {"split": split} if split != "train" else {}
    options |= {"heldout_split": heldout} if heldout else {}
    rows = splits[split]
    return Data(
        plugin="huggingface",
        options=options,
        rows=[dict(row) for row in itertools.islice(rows, _LOOKED_AT)],
        num_rows=len(rows) if hasattr(rows, "__len__") else None,
        has_heldout=heldout is not None,
    )
