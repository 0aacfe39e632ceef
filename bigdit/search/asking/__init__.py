"""From what a person writes to a question that can be answered, or to all that is wrong with it: nothing is run.

The question itself, a value, is `search/question.py`; what it may hold by its type is not checked here again.
"""
