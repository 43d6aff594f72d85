"""`world-webdataset`: WebDataset tars of clips, here or in a store such as S3."""
