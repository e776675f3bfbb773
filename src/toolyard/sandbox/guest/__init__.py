"""Code that runs on the jail's side: the zygote, its workers, and the child that becomes the program.

It is started by path under whatever interpreter the programs are to have, where Toolyard may not be installed. So it
imports only the standard library and its own siblings, by relative import, and as little of that as possible: every
page it touches costs again in every program.
"""
