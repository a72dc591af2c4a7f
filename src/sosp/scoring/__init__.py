"""Score structures: from a model and data to a Saliency, the loss change when each structure is removed."""
