"""A training run as one page: what it has left in its output, curves of it, its pictures, and when the page is made."""
