"""The `ludic` command: one module for each subcommand. `app` has the options, and imports the
rest when it is needed."""
