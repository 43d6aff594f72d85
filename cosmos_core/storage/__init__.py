"""Stores of files: local folders, and what fsspec reaches, such as S3 with the credentials of the environment.

Imports no torch, and fsspec's own packages (s3fs) only where a URL needs them.
"""

from cosmos_core.storage.models import MARKS, cache_folder, check_place, fetch_model, move_folder, send_folder
from cosmos_core.storage.stores import failures, file_system, is_out_of_reach, is_url, reason_of, storage_options, told

__all__ = [
    "MARKS",
    "cache_folder",
    "check_place",
    "failures",
    "fetch_model",
    "file_system",
    "is_out_of_reach",
    "is_url",
    "move_folder",
    "reason_of",
    "send_folder",
    "storage_options",
    "told",
]
