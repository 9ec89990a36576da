"""What completions are worth: the registered reward functions and those of the user."""
