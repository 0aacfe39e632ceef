"""Imported once by the server that forks workers (`worker.server`), with the libraries' warnings suppressed."""

from bigdit import libraries

libraries.prepare()

with libraries.importing():
    import bigdit.encoders.t5
    import bigdit.extract.verify
    import bigdit.extract.worker  # noqa: F401
