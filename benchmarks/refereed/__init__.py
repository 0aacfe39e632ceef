"""The referee's rows, what is known to be apart in them, and their page."""
