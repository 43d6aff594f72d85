"""A dataset from easy to hard."""

from cosmos_dataset_curriculum.options import CurriculumOptions, Part
from cosmos_dataset_curriculum.plugin import Curriculum

__all__ = ["Curriculum", "CurriculumOptions", "Part"]
