"""Exit statuses by which whoever started a process decides whether to start it again. The numbers
are those of sysexits.h."""

TRY_AGAIN = 75
"""A rank, a server or the network failed. A new start resumes from the last checkpoint."""
DO_NOT_RETRY = 78
"""A setting, a file or the disk must be changed first."""
