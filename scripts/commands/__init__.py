"""The commands, one file per group: options, and what does the work. Nothing heavy is imported before one runs."""
