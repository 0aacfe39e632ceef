"""How results are laid out for reading: tables in the terminal, pictures, and pages of HTML.

It shows what the layers below have found, and computes nothing that is not for the eye.
"""
