"""What the command's exit status means."""

PASSED = 0
FAILED = 1  # the command ran, and its verdict is no: validate found a difference
USAGE = 2  # the request cannot be served; argparse uses the same status
CRASHED = 70  # a process failed in a way that is not the user's doing (EX_SOFTWARE)
LOST_PEER = 71  # a rank gave up because another rank had gone; never the root cause
INTERRUPTED = 130  # ended by Ctrl-C or SIGTERM
