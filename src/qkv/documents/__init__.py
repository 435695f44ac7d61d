"""Documents: what of a file is to be translated, and the file again with the translations in its place."""

from __future__ import annotations

from qkv.documents.document import FORMATS, Document

__all__ = ["FORMATS", "Document"]
