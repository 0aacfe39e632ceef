"""Claims about training memory and time, and what answers them."""
