"""What CUDA kernels give and take, in place of what fake ones do: shapes, strides, masks, attention, reads of data."""
