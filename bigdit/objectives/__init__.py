"""Training objectives: a loss, and the integration that turns its prediction into samples. A new one is a file.

Noise and t are drawn from a sample's own seed, so that every engine and split of a batch sees the same.
"""

from bigdit.objectives.flow_matching import Predict, draw_noise, euler, loss

__all__ = ["Predict", "draw_noise", "euler", "loss"]
