"""The parts of a push: the connection to a server, the manifest of its weights, folders on a shared
disk, steps on many servers at once."""
