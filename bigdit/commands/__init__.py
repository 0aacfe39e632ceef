"""The commands, one file each. A command parses its options and calls the layers below, which import torch."""
