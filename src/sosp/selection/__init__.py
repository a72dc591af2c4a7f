"""Selection: choose the structures to remove, from a Saliency and a budget to a Mask."""
