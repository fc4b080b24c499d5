"""The clock for code from outside: nothing in the process that runs it is trusted."""
