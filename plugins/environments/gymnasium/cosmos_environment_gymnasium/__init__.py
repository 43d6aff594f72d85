"""The environment `gymnasium`: Gymnasium's environments, in which a language model acts turn by turn."""
