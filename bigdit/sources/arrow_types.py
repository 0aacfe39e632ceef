"""What the columns of Arrow and Parquet files hold, as far as sources care."""

from __future__ import annotations

import pyarrow as pa

from bigdit.sources.columns import Cells


def cells_of(schema: pa.Schema) -> dict[str, Cells]:
    """Each column's kind of cells."""
    return {field.name: _cells(field.type) for field in schema}


def _cells(kind: pa.DataType) -> Cells:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind):
        return "text"
    if _is_list(kind) and _is_text(kind.value_type):
        return "texts"
    if _is_number(kind) or (_is_list(kind) and _is_number(kind.value_type)):
        return "numbers"
    if _is_bytes(kind) or is_image_struct(kind):
        return "picture"
    return "other"


def is_image_struct(kind: pa.DataType) -> bool:
    """Hugging Face's Image: the file's bytes, or null and its path."""
    return pa.types.is_struct(kind) and any(field.name == "bytes" and _is_bytes(field.type) for field in kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
