"""The kernels that ship with qopt, one op a file."""
