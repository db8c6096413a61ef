"""Guards of the source tree have nothing to read where an installed wheel is tested."""

from pathlib import Path

import slipstream

_is_checkout = (Path(next(iter(slipstream.__path__))) / "pyproject.toml").is_file()
collect_ignore = [] if _is_checkout else ["test_docs.py", "test_hygiene.py"]
