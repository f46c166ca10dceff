"""The CRC-32 of zip and gzip at the speed of memory, where a fast one is installed.

ISA-L folds with the processor's carry-less multiplication: 20 to 60 GB/s, where the zlib that most Pythons are built
with reaches 1 to 4. It is installed wherever torch runs on a processor that it knows; zlib gives the same numbers.
"""

from __future__ import annotations

__all__ = ["crc32"]

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32
