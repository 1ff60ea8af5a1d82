"""The command line: validate, train."""
