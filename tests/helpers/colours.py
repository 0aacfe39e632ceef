"""Colours as seen by people with normal sight and with each kind of colour blindness."""

import numpy as np

VISIONS = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    srgb = np.array(rgb(colour)) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(vision @ linear, 0, 1) / (0.9505, 1.0, 1.089)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), xyz * 24389 / 27 / 116 + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
