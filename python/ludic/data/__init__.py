"""Data sets in the formats of TRL, from files or by hub id."""

from ludic.data.dataset import DataSet, load_data
from ludic.data.formats import KINDS, Kind, Row

__all__ = ["KINDS", "DataSet", "Kind", "Row", "load_data"]
