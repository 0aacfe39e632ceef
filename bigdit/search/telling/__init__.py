"""What a plan says beside its recommendation: alternatives, curves, settings, what would fit, what to lower.

The plan itself, a value, is `search/plan.py`; words and pages are `report`'s.
"""
