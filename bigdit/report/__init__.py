"""How results are laid out for reading: tables in the terminal."""
