"""Which weights captions may have."""

LEAST_WEIGHT, MOST_WEIGHT = 1.2e-38, 3.4e38
"""Of captions, which the store keeps in fp32 (IEEE 754): others would be 0 or infinite there."""
WEIGHTS = f"from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"


def is_weight(number: float) -> bool:
    """Whether a caption may have this weight; an integer may be of any size."""
    return LEAST_WEIGHT <= number <= MOST_WEIGHT
