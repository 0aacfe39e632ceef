"""Two training steps on an emulated GPU, in processes of their own: what they take, and whether they fit.

`request` is what is asked, `cards` asks it, `__main__` is the process that answers: an attempt (`run_attempt.py`), or a
recorded run whose every byte has a category (`recorded.py`). `measured` is the same two steps on a real GPU.
"""
