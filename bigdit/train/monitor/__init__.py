"""What is seen of a training: its figures, the loss of what is held out, pictures, and who else is shown them."""
