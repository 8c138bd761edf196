"""Models that see images: their processors, features, positions, and what can be computed
exactly."""
