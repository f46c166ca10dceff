"""What a file of a zoo takes, as far as those that are done tell: some seconds, and some more for each byte."""

from __future__ import annotations

_MEMORY = 0.995
"""How much of what was learned is kept with each file: the largest come first, and the last may be of another kind."""

_USUAL = ((0, 0.01, 1.0), (10**9, 5.0, 1e-4))
"""What is believed before the first file is done: bytes, seconds, and as how many files that counts. The first real
ones are often of one size; they would else leave open how much of their time is due to it, and so foretell anything for
ten thousand small ones, or for a large one."""


class Effort:
    """A line through the files that are done, by least squares: seconds over bytes."""

    def __init__(self) -> None:
        self._files = self._nbytes = self._seconds = self._squares = self._products = 0.0
        for size, seconds, weight in _USUAL:
            self._add(size, seconds, weight)

    def learn(self, size: int, seconds: float) -> None:
        """A file of ``size`` bytes took so many seconds."""
        self._files *= _MEMORY
        self._nbytes *= _MEMORY
        self._seconds *= _MEMORY
        self._squares *= _MEMORY
        self._products *= _MEMORY
        self._add(size, seconds, 1.0)

    def _add(self, size: float, seconds: float, weight: float) -> None:
        self._files += weight
        self._nbytes += weight * size
        self._seconds += weight * seconds
        self._squares += weight * size * size
        self._products += weight * size * seconds

    def of(self, files: int, nbytes: int) -> float:
        """The seconds that files of so many bytes together take, one after another."""
        spread = self._files * self._squares - self._nbytes**2
        rate = max((self._files * self._products - self._nbytes * self._seconds) / spread, 0.0) if spread > 0 else 0.0
        each = (self._seconds - rate * self._nbytes) / self._files
        if each < 0:
            each, rate = 0.0, self._seconds / self._nbytes
        return each * files + rate * nbytes
