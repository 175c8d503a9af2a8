"""Calls that generated code makes and ATen has no single name for."""

from __future__ import annotations
