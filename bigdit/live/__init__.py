"""A plan's page whose every change runs: what may be asked of it, what answers, and the small server between them.

The page itself is laid out in `report`; what a change takes is asked of `search` and `rehearse`.
"""
