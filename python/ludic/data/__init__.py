"""Data sets in the formats of TRL, from files or by hub id."""

from ludic.data.dataset import DataMixture, DataSet, MixtureEntry, load_data, load_mixture
from ludic.data.formats import KINDS, Kind, Row

__all__ = ["KINDS", "DataMixture", "DataSet", "Kind", "MixtureEntry", "Row", "load_data", "load_mixture"]
