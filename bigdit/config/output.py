"""What lies in a run's output, by name: what writes it and what reads it are layers apart."""

METRICS = "metrics.jsonl"
"""A row a step."""

RECORD = "run.json"
"""The run as its last start has it, and what its first steps took."""

RECEIPT = "receipt.json"
"""Of a run that came to its end."""


def receipt_of(stage: int) -> str:
    """Of a stage that another one follows."""
    return f"receipt-stage-{stage}.json"


PAGE = "report.html"

CHECKPOINTS, AVERAGES, EXPORTS, SAMPLES = "checkpoints", "averages", "exports", "samples"
"""Folders; in each a name a step, such as step-00000800."""
