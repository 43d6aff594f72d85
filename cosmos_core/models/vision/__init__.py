"""Vision-language models: images, processors, and how both enter a packed row and a text decoder."""
