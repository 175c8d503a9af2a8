"""What was measured and compared, and the means to do it."""
