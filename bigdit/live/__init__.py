"""A plan's page whose every change runs: what may be asked of it, what answers, and the small server between them."""
