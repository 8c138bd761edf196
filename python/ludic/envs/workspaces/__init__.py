"""Places where the programs of one episode work: a folder, a sandbox of bubblewrap, a container."""
