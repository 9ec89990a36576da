"""A run, or several, in a browser of this machine while they train."""
