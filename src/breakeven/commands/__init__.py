"""The subcommands: their flags, and what is called and printed. Heavy imports wait until a command runs."""
