"""The policies: each decides, in its own way, what becomes of every storage."""
