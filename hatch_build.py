"""Compiles the kernel of the value scan into the wheel, if a C compiler is available.

That wheel installs without a compiler. An install from source without one, or for a system other than Linux, gives a
package that does the same work in numpy. ``CKPTFIX_KERNEL=no`` builds that one on purpose.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("ckptfix/values/kernel.c")
LIBRARY = Path("ckptfix/values/_kernel.so")

FLAGS = ("-std=gnu11", "-O3", "-fno-trapping-math", "-shared", "-fPIC")


class KernelHook(BuildHookInterface[Any]):
    """Adds the library to wheels, those of an editable install included, and the platform to their names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Run before hatchling builds."""
        if self.target_name != "wheel" or not _compile(Path(self.root)):
            return
        build_data["artifacts"].append(LIBRARY.as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _compile(root: Path) -> bool:
    """Build the library, and return whether it exists now. One of an earlier build never stays: its sources may have
    been others."""
    (root / LIBRARY).unlink(missing_ok=True)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    is_wanted = os.environ.get("CKPTFIX_KERNEL") != "no" and sys.platform == "linux" and sys.maxsize > 2**32
    if not is_wanted or sys.byteorder != "little" or not compiler or shutil.which(compiler[0]) is None:
        return False
    # Built aside and renamed: a process that runs with the old library keeps it.
    built = root / LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    try:
        done = subprocess.run(
            [*compiler, *FLAGS, str(root / SOURCE), "-o", str(built)], capture_output=True, check=False
        )
        if done.returncode == 0:
            built.replace(root / LIBRARY)
        return done.returncode == 0
    except OSError:  # a compiler that cannot be started
        return False
    finally:
        built.unlink(missing_ok=True)
