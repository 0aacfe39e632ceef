"""The same steps asked of an emulated card: processes with the CUDA build of torch, what they answer, and its cache."""
