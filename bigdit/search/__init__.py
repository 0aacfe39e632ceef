"""From a model and a card to a plan. Nothing here imports torch: rehearsals run in processes of their own."""

from bigdit.search.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
