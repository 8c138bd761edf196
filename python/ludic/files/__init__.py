"""Files that are read and written: JSON lines, and folders that appear whole or not at all."""
