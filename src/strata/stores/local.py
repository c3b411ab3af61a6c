"""Values on a local disk, which survive the machine losing power.

`put` returns when the bytes, the name and every directory on the way to it have been flushed. Large values go
around the page cache, straight from the caller's memory where that is page-aligned. Free space is checked before a
write begins. A failed flush is final: the value is dropped, never flushed again and never published.

Not for network file systems without `link` and `flock`.
"""

from __future__ import annotations

from typing import ClassVar

from strata.stores.files import FileStore


class LocalStore(FileStore):
    """A directory of values. It is made on the first write; opening one reads nothing and changes nothing but
    temporary files of dead writers."""

    tier: ClassVar[str] = "NVME"
    durable: ClassVar[bool] = True
    direct: ClassVar[bool] = True
    file_mode: ClassVar[int] = 0o666
    dir_mode: ClassVar[int] = 0o777
