"""Code that runs on the far side of the jail: the zygote, its workers, and the child that becomes the program.

It is started by path under whatever interpreter the programs are to have, where Toolyard may not be installed. So it
imports the standard library and its own siblings only, by relative import, and as little of that as it can: every page
it touches is paid for again in every program.
"""
