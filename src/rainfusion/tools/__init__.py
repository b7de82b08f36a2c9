"""The command line: `rainfusion bench`, `rainfusion inspect`, `rainfusion demo`. Nothing here is needed to attend."""
