"""How weights travel: the link to a server, the manifest of what is sent, folders on a shared
disk, many servers at once."""
