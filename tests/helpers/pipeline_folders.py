"""Folders in diffusers' layout with all configs and no weights, as the emulator writes them for repositories of the
hub."""

import json

from bigdit.emulator.fake_weights import repository


def pipeline_folder(folder, name):
    """A folder with the configs of a repository."""
    for path, config in repository(name).configs.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config))
    return folder


def changed(file, **values):
    """Change values of a JSON object in a file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
