"""What compression has lost of gradients: kept until it is known what became of their averages, then added."""
