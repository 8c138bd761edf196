"""Data sets in the formats of TRL, from files or by hub id."""

from ludic.data.dataset import DataSet, load_data
from ludic.data.formats import KINDS, Kind, Row
from ludic.data.mixture import DataMixture, MixtureEntry, load_mixture

__all__ = ["KINDS", "DataMixture", "DataSet", "Kind", "MixtureEntry", "Row", "load_data", "load_mixture"]
