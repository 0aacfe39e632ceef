"""What the server imports from which workers are forked: once, however many there are, and without remarks."""

from bigdit import libraries

libraries.prepare()

with libraries.importing():
    import bigdit.encoders.t5
    import bigdit.extract.verify
    import bigdit.extract.worker  # noqa: F401
