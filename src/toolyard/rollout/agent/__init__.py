"""Requests that are played by an agent of the user's: a command or a function that talks to the gateway."""
