"""One file a transformer family: what differs in how the model is called, and which modules are its blocks."""
