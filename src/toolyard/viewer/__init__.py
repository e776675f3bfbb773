"""Reading dumps, for people: in a terminal and in a browser. `library` and the other models know no user interface."""
