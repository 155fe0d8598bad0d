"""The recipes that ship with qopt."""
