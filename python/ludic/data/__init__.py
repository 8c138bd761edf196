"""Data sets in the formats that TRL reads, from files or by their id."""

from ludic.data.dataset import DataSet, load_data
from ludic.data.formats import KINDS, Kind, Row

__all__ = ["KINDS", "DataSet", "Kind", "Row", "load_data"]
