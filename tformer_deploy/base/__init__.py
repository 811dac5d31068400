"""What every other room stands on: errors, files, JSON headers, lines of text, processes and the machine.

In: paths and bytes that others may have written. Out: checked values, or one error that says how to mend it.
All rooms may use it; it uses none.
"""
