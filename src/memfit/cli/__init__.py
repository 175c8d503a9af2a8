"""The command `memfit`: one file per subcommand, each a function from parsed arguments to an exit code."""
