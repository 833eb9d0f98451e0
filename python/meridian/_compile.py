"""The process that compiles one policy component. The host starts this file; no module imports it.

It runs without site-packages, so the extension module is loaded from the file that the host names.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location


def main() -> int:
    """Load the extension module, and return the exit code."""
    spec = spec_from_file_location("meridian._native", sys.argv[1])
    if spec is None or spec.loader is None:
        return 2
    native = module_from_spec(spec)
    spec.loader.exec_module(native)
    return native.compile_child()


if __name__ == "__main__":
    sys.exit(main())
