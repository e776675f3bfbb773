"""One request, from PENDING to its trajectory: the state machine, the code that performs its effects, and the end."""
