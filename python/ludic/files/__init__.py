"""Files: JSON values and lines, and text, JSON and folders that are written whole or not at all."""
