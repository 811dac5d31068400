"""What all other rooms use: errors, files, JSON headers, lines of text, processes, the machine, HTML pages.

In: paths and bytes, possibly of others. Out: checked values, or one error that says how to fix it.
All rooms may use it; it uses none.
"""
