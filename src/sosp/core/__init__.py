"""What every step needs: data, losses, layer types, gates, records, borrowed models, files, processes."""
