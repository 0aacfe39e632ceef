"""What is seen of a training beside its metrics: the loss of what is held out, pictures, and who else is shown them."""
