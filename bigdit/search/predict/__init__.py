"""What rehearsals of shallow siblings say of the whole model at any micro-batch and number of recomputed blocks."""
