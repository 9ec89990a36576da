"""What of a configuration is wrong, before any process starts: a file a check, a table of them in `checks`."""
