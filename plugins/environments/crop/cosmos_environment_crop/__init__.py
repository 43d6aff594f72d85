"""The environment `crop`, and the dataset `crop-boards` of pictures that need it."""
