"""One file per family of methods: from derivatives to a number per structure."""
