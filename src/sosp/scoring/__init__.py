"""From a model and data to a Saliency: what removing each structure does to the loss."""
