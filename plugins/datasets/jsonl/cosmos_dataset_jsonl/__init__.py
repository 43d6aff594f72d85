"""JSONL and Parquet files as datasets."""

from cosmos_dataset_jsonl.plugin import FileDataset, JsonlOptions

__all__ = ["FileDataset", "JsonlOptions"]
