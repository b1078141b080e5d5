"""The native suffix automaton (suffix.c) behind the interface of its reference in kernels/automaton.py."""

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p
from functools import cache

from foredraft.kernels.automaton import MOST, Automaton, Grown, Law, Place, Shape, SlowAutomaton
from foredraft.kernels.cpu.library import library

STATE = (1 << 32) - 1  # the half of a packed place that is its state; little-endian, as all that kernels run on


class _Place(ctypes.Structure):
    _fields_ = (("text", c_void_p), ("state", c_int32), ("length", c_int32))


class _Shape(ctypes.Structure):
    _fields_ = (
        ("trust", c_void_p),
        ("ends", c_void_p),
        ("bar", c_double),
        *((name, c_int32) for name in "nodes depth width num_ends".split()),
    )


class NativeAutomaton:
    """Automaton by suffix.c: some 60 to 80 bytes per token. Raises MemoryError where the system has no more."""

    def __init__(self) -> None:
        self._handle = _handle()
        self.address: int = self._handle.fd_suffix_new() or 0
        if not self.address:
            raise MemoryError("no memory for a suffix automaton")
        weakref.finalize(self, self._handle.fd_suffix_free, self.address)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def num_bytes(self) -> int:
        return int(self._handle.fd_suffix_bytes(self.address))

    @property
    def work(self) -> int:
        return int(self._handle.fd_suffix_work(self.address))

    def extend(self, tokens: Sequence[int]) -> None:
        ids = array("i", tokens)
        if self._handle.fd_suffix_extend(self.address, ids.buffer_info()[0], len(ids)):
            raise MemoryError(f"no memory for a suffix automaton of more than {self._size} tokens")
        self._size += len(ids)

    def end(self) -> Place:
        place = _Place()
        self._handle.fd_suffix_end(self.address, place)
        return Place(self, place.state, place.length)

    @staticmethod
    def follow(places: Sequence[Place], tokens: Sequence[int]) -> list[Place]:
        raw, ids = _packed(places), array("i", tokens)
        _handle().fd_suffix_follow(raw.buffer_info()[0], len(places), ids.buffer_info()[0], len(ids))
        return [Place(place[0], at & STATE, at >> 32) for place, at in zip(places, raw[1::2], strict=True)]

    @staticmethod
    def law(places: Sequence[Place], trust: "array[float]") -> Law:
        raw, tokens, chances = _packed(places), (c_int32 * MOST)(), (c_double * MOST)()
        size = _handle().fd_suffix_law(raw.buffer_info()[0], len(places), trust.buffer_info()[0], tokens, chances)
        return Law(tokens[:size], chances[:size])

    @staticmethod
    def draft(places: Sequence[Place], trust: "array[float]", shape: Shape) -> Grown:
        raw, ends = _packed(places), array("i", sorted(shape.ends))
        tokens, parents, chances = (c_int32 * shape.nodes)(), (c_int32 * shape.nodes)(), (c_double * shape.nodes)()
        given = _Shape(
            trust.buffer_info()[0], ends.buffer_info()[0], shape.bar, shape.nodes, shape.depth, shape.width, len(ends)
        )
        size = _handle().fd_suffix_draft(raw.buffer_info()[0], len(places), given, tokens, parents, chances)
        if size < 0:
            raise MemoryError("no memory for a draft")
        return Grown(tokens[:size], parents[:size], chances[:size])


def automaton() -> type[Automaton]:
    """The native one, or its reference where the native library was not built or is switched off."""
    return SlowAutomaton if library() is None else NativeAutomaton


@cache
def _handle() -> ctypes.CDLL:
    found = library()
    assert found is not None, "automaton() says whether there is a native one"
    handle = found.handle
    handle.fd_suffix_new.restype = c_void_p
    handle.fd_suffix_free.argtypes = [c_void_p]
    handle.fd_suffix_free.restype = None
    handle.fd_suffix_extend.argtypes = [c_void_p, c_void_p, c_int64]
    for name in ("fd_suffix_bytes", "fd_suffix_work"):
        getattr(handle, name).argtypes = [c_void_p]
        getattr(handle, name).restype = c_int64
    handle.fd_suffix_end.argtypes = [c_void_p, POINTER(_Place)]
    handle.fd_suffix_end.restype = None
    handle.fd_suffix_follow.argtypes = [c_void_p, c_int32, c_void_p, c_int64]
    handle.fd_suffix_follow.restype = None
    handle.fd_suffix_law.argtypes = [c_void_p, c_int32, c_void_p, c_void_p, c_void_p]
    handle.fd_suffix_draft.argtypes = [c_void_p, c_int32, POINTER(_Shape), c_void_p, c_void_p, c_void_p]
    return handle


def _packed(places: Sequence[Place]) -> "array[int]":
    """As an array of fd_place: the automaton's address, then state and length in the halves of one number, which
    costs a third of filling in ctypes' structures."""
    return array("q", [n for text, state, length in places for n in (text.address, state | length << 32)])  # type: ignore[attr-defined]
