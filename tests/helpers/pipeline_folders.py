"""Folders in diffusers' layout, as the emulator writes them of repositories of the hub: all configs, no weights."""

import json

from bigdit.emulator.fake_weights import repository


def pipeline_folder(folder, name):
    """The configs of a repository."""
    for path, config in repository(name).configs.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config))
    return folder


def changed(file, **values):
    """Write other values into a JSON object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
