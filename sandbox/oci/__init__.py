"""Images in the form of the Open Container Initiative: documents, layers, archives, registries."""
