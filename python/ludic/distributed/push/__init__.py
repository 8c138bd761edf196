"""The parts of a push to running servers: the connection, the manifest of the weights, folders on a
shared disk, and steps that all servers take together."""
