"""The recipe: schema, loading, overrides, strict validation, and the resolved job."""

from cosmos_core.config.job import Job
from cosmos_core.config.schema import Recipe, option

__all__ = ["Job", "Recipe", "option"]
