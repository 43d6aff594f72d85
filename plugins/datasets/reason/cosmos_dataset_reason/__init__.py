"""Questions about videos and images, labelled by the ontologies of Cosmos-Reason1."""

from cosmos_dataset_reason.ontology import CAPABILITIES, COMMON_SENSE, EMBODIMENTS, levels
from cosmos_dataset_reason.options import ReasonOptions
from cosmos_dataset_reason.plugin import ReasonDataset

__all__ = ["CAPABILITIES", "COMMON_SENSE", "EMBODIMENTS", "ReasonDataset", "ReasonOptions", "levels"]
