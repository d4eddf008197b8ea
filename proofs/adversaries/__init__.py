"""Small wrong variants that must be rejected and right ones that must pass, a file an operator.

The first line of each docstring is ``N. what it does`` with N the mechanism's number in the list of known
mechanisms, or ``RIGHT N. ...`` for one that must not be rejected. The files are loaded as plug-ins are.
"""
