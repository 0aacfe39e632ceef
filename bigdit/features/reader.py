"""Rows of one part, read at their offsets into the memory of tensors, and held against their digests."""

from __future__ import annotations

import os

import torch

from bigdit.errors import UserError
from bigdit.features.digest import bytes_of, sample_digest
from bigdit.features.header import Column, Header, damaged
from bigdit.features.part import Shape, shape_name


class FileReader:
    """A file of the store, open for reads at offsets while the `with` block lasts."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def __enter__(self) -> FileReader:
        try:
            self._descriptor = os.open(self.header.path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"data.features: {self.header.path} cannot be read: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Rows [first, first + count) of a column, as stored."""
        column = self.header.columns[name]
        rows = torch.empty((count, *column.shape[1:]), dtype=column.dtype)
        self.rows_into(column, first, rows)
        return rows

    def rows_into(self, column: Column, first: int, rows: torch.Tensor) -> None:
        """Fill the contiguous tensor `rows` with as many rows from `first` on. Raises UserError at the file's end."""
        memory = bytes_of(rows)
        offset = column.offset + first * column.row_bytes
        while memory:
            try:
                count = os.preadv(self._descriptor, [memory], offset)
            except OSError as error:
                raise UserError(f"data.features: {self.header.path} cannot be read: {error.strerror}") from None
            if not count:
                raise damaged(self.header.path, f"ends at byte {offset}, before its data does")
            memory, offset = memory[count:], offset + count

    def sample(self, shape: Shape, row: int, latents: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Fill `latents` [C, H, W] with a part's row; its source index and text [len, dim].

        Raises UserError where the digest is not that of the bytes read.
        """
        name = shape_name(shape)
        index, text_start, text_len, digest = self.rows(f"rows/{name}", row, 1)[0].tolist()
        self.rows_into(self.header.columns[f"latents/{name}"], row, latents)
        text_rows = self.header.columns["text"].shape[0]
        # The bounds come first: a flipped bit in them could ask for more memory than there is.
        if index >= 0 and 0 <= text_start <= text_start + text_len <= text_rows and text_len >= 0:
            text = self.rows("text", text_start, text_len)
            if digest == sample_digest(index, latents, text):
                return index, text
        raise damaged(self.header.path, f"is damaged in row {row} of {name}: its digest differs")
