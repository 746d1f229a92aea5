"""The reduction of gradients, from their arrival in backward to the stored averages; it knows no class of torch's."""
