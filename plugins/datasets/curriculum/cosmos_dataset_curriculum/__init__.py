"""A dataset from easy to hard."""

from cosmos_dataset_curriculum.dataset import Curriculum
from cosmos_dataset_curriculum.options import CurriculumOptions, Part

__all__ = ["Curriculum", "CurriculumOptions", "Part"]
