"""What all tests need of the process that runs them."""

import signal

# A shell ignores Ctrl-C in what it starts in the background, and programs that tests start would do so, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
