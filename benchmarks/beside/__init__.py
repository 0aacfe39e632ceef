"""bigdit and scripts of other projects: the same training on the same emulated card, side by side."""
