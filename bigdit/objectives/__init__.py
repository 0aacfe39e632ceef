"""Training objectives: a loss, and the integration that turns its prediction into samples. A new one is a file."""

from bigdit.objectives.flow_matching import Predict, draw_noise, euler, loss

__all__ = ["Predict", "draw_noise", "euler", "loss"]
