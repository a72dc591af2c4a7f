"""From a Saliency and a budget to a Mask: which structures are removed."""
