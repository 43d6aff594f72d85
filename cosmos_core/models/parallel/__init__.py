"""A Hugging Face model on a mesh: what its parts are, which plan they follow, and where they are cut."""
