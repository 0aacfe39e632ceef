"""The server that forks workers (`worker.server`) imports this once. It suppresses the libraries' warnings."""

from bigdit import libraries

libraries.prepare()

with libraries.importing():
    import bigdit.encoders.t5
    import bigdit.extract.verify
    import bigdit.extract.worker  # noqa: F401
