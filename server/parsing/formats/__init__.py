"""One file per format in which models write tool calls."""
