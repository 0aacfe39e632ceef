"""Small wheels that pip installs in place of real ones."""

import zipfile


def wheel(folder, name, number, files, *requires):
    """A wheel in `folder` with these texts by file name."""
    folder.mkdir(exist_ok=True)
    about = f"{name}-{number}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}", *requires]
    files |= {
        f"{about}/METADATA": "\n".join([*metadata, ""]),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as packed:
        for file, text in files.items():
            packed.writestr(file, text)
    return folder
