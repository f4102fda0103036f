"""A node that cannot outlive the `rowlock dev` or `rowlock demo` that started it.

    python -m rowlock.cli.dev_node PID [arguments of rowlock node]

PID is that of the process that started it. After a kill -9 of that one the kernel kills this
process, and with it go its executors.
"""

import sys

from rowlock.runtime.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))

    from rowlock.cli.main import main

    sys.exit(main(["node", *sys.argv[2:]]))
