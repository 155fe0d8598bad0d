"""The passes that ship with qopt, one a file."""
