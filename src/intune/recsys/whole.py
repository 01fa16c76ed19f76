"""Files that come to be whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(path: Path, *, suffix: str, replace: bool) -> Iterator[IO[bytes]]:
    """Write a file beside its place; where the block ends well, flush it to disk and give it its name.

    After an error in the block, Ctrl-C among them, what was written is deleted and `path` is as it was. After a kill
    or a power cut it is as it was, too; then what was written may lie beside it.

    Args:
        path: The file; its folder is there.
        suffix: Ending of the name that it has meanwhile.
        replace: Whether it takes the place of a file that is there.

    Yields:
        The file, open for writing bytes.

    Raises:
        FileExistsError: If a file is there that is not to be replaced.
        OSError: If it cannot be written, as on a full disk.
    """
    part = path.with_name(path.name + suffix)
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and not replace:  # it may have come meanwhile
            raise FileExistsError(f"{path} is there already; name a new file")
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that is on its way says more
            part.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)
