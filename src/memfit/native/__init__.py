"""Code in C for what is called many thousand times, compiled where it runs; everything here has a twin in Python."""
