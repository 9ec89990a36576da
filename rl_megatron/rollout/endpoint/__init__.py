"""Serves conversations over HTTP, in OpenAI's form, from any engine. Runs in the controller process."""
