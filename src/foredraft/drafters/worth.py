"""What the drafts of each part of a composition are worth, and what they cost. Numbers alone: no tensors, no clock.

Everything here is read in every step, so it is a handful of floats: a draft is two shares, of first nodes and of later
ones that were kept where all before them were; a cost is a line through two points' worth of sums.
"""

from dataclasses import dataclass, field

FIRST, LATER = 0.6, 0.7  # shares of what nobody has tried yet
SHARED_MEMORY, OWN_MEMORY = 128.0, 32.0  # drafts
PULLS = (2.0, 3.0, 4.0)  # tries that what a share starts from is worth: nothing, the part as a whole, everybody
COST_MEMORY = 48.0  # steps
OUTLIER = 2.0  # a time is cut to so many times the prediction


@dataclass(slots=True)
class Track:
    """Tries and hits, older ones fading."""

    memory: float
    first: float = 0.0
    first_hits: float = 0.0
    later: float = 0.0
    later_hits: float = 0.0

    def count(self, kept: int, reached: int) -> None:
        """A draft of which `reached` nodes in a row were tried and the first `kept` held."""
        fade = 1.0 - 1.0 / self.memory
        self.first = self.first * fade + 1.0
        self.first_hits *= fade
        if kept:
            self.first_hits += 1.0
        if reached > 1:
            fade **= reached - 1
            self.later = self.later * fade + reached - 1
            self.later_hits = self.later_hits * fade + kept - 1

    def over(self, first: float, later: float, pull: float) -> tuple[float, float]:
        """Its two shares, pulled to others."""
        return (
            (self.first_hits + pull * first) / (self.first + pull),
            (self.later_hits + pull * later) / (self.later + pull),
        )


Key = tuple[object, int]  # a part or several, and how much spoke for the draft


@dataclass
class Worth:
    """Estimates by part, by how much speaks for its draft, and by request: each starts from the one before it.

    Greedy and drawn texts are apart, for drafts that are kept in the one may not be in the other.
    """

    _whole: dict[tuple[bool, object], Track] = field(default_factory=dict)
    _shared: dict[tuple[bool, Key], Track] = field(default_factory=dict)
    _own: dict[int, dict[Key, Track]] = field(default_factory=dict)  # by slot
    _drawn: set[int] = field(default_factory=set)  # slots whose texts are drawn

    def meet(self, slot: int, is_drawn: bool) -> None:
        if is_drawn:
            self._drawn.add(slot)

    def learn(self, slot: int, key: Key, kept: int, reached: int) -> None:
        if reached <= 0:
            return
        own, is_drawn = self._own.setdefault(slot, {}), slot in self._drawn
        for track in (
            self._whole.setdefault((is_drawn, key[0]), Track(SHARED_MEMORY)),
            self._shared.setdefault((is_drawn, key), Track(SHARED_MEMORY)),
            own.setdefault(key, Track(OWN_MEMORY)),
        ):
            track.count(kept, reached)

    def shares(self, slot: int, key: Key, first: float = FIRST, later: float = LATER) -> tuple[float, float]:
        """Of first nodes and of later ones."""
        is_drawn, own = slot in self._drawn, self._own.get(slot, {})
        tracks = self._whole.get((is_drawn, key[0])), self._shared.get((is_drawn, key)), own.get(key)
        for track, pull in zip(tracks, PULLS, strict=True):
            if track is not None:
                first, later = track.over(first, later, pull)
        return first, later

    def tries(self, slot: int, key: Key) -> float:
        track = self._shared.get((slot in self._drawn, key))
        return 0.0 if track is None else track.first

    def forget(self, slot: int) -> None:
        self._own.pop(slot, None)
        self._drawn.discard(slot)


def gain(shares: tuple[float, float], depth: float) -> float:
    """Tokens that a draft of this depth should win."""
    first, later = shares
    if depth <= 0.0:
        return 0.0
    return first * (depth if later > 0.999 else (1.0 - later**depth) / (1.0 - later))


class Trend:
    """Seconds by some size, a line with no negative part; of one size alone it knows the height and not the slope."""

    def __init__(self, is_proportional: bool) -> None:
        self.is_proportional = is_proportional  # what it takes a time to be while it has seen one size alone
        self.slope, self.base = 0.0, 0.0
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        return self._n > 0.0

    def at(self, x: float) -> float:
        return self.base + self.slope * x

    def learn(self, x: float, seconds: float) -> None:
        if self._n > 2.0:
            seconds = min(seconds, OUTLIER * self.at(x))
        fade = 1.0 - 1.0 / COST_MEMORY
        self._n = self._n * fade + 1.0
        self._x, self._xx = self._x * fade + x, self._xx * fade + x * x
        self._y, self._xy = self._y * fade + seconds, self._xy * fade + x * seconds
        mean, height = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean * mean
        prior = height / mean if self.is_proportional and mean > 0.0 else 0.0
        pull = 0.02 * mean * mean / self._n
        slope = (self._xy / self._n - mean * height + pull * prior) / (spread + pull) if spread + pull > 0.0 else prior
        self.slope = min(max(slope, 0.0), height / mean if mean > 0.0 else 0.0)
        self.base = height - self.slope * mean
