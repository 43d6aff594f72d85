"""What vision-language models see: images, processors, and how they enter a packed row and a text decoder."""
