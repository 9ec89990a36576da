"""What the model talks to over several turns: the Protocol, the shipped environments, and how yours is found."""
