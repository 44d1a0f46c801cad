"""The commands, one file per group. They declare their options and delegate; nothing heavy is imported before one runs."""
