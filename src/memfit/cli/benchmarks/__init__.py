"""The benchmarks of `memfit bench`, a file each: SUMMARY, add_arguments(parser), run(arguments, screen)."""
