"""The page of `ludic view`: the data of runs as one HTML file."""
