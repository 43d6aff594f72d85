"""Building blocks of datasets: where rows are, how they become prompts, which are left out.

A dataset plugin that reads gives the source of its rows (`RowSource`) and a mapping of one row to a `Prompt`, and
`RowsDataset` does the rest; one that makes its rows up draws each, as a `DrawnDataset`. Nothing here imports more than
the standard library and attrs.
"""

from cosmos_core.data.dataset import DrawnDataset, RowsDataset, Sources, is_held_out
from cosmos_core.data.jsonlines import JsonLinesFile, LinesFile
from cosmos_core.data.mapping import FieldMapping, RowMapping
from cosmos_core.data.options import FieldOptions, RowsOptions
from cosmos_core.data.paths import expand, find_files
from cosmos_core.data.rows import BadRowError, LeftOutError, RawRow, RowSource, field, locations, text_field

__all__ = [
    "BadRowError",
    "DrawnDataset",
    "FieldMapping",
    "FieldOptions",
    "JsonLinesFile",
    "LeftOutError",
    "LinesFile",
    "RawRow",
    "RowMapping",
    "RowSource",
    "RowsDataset",
    "RowsOptions",
    "Sources",
    "expand",
    "field",
    "find_files",
    "is_held_out",
    "locations",
    "text_field",
]
