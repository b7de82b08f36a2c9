"""Other libraries' ways to call this one. Nothing here acts until it is asked to."""
