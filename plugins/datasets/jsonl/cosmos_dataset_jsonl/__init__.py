"""JSONL and Parquet files as datasets."""

from cosmos_dataset_jsonl.dataset import FileDataset
from cosmos_dataset_jsonl.options import JsonlOptions

__all__ = ["FileDataset", "JsonlOptions"]
