"""Native suffix automaton (suffix.c) with the interface of its reference in drafters/suffix/automaton.py."""

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p
from functools import cache

from foredraft.drafters.suffix.automaton import (
    MAX_CONTINUATIONS,
    Continuations,
    RankedDraft,
    RankedDraftSpec,
    ReferenceAutomaton,
    SuffixAutomaton,
    SuffixMatch,
)
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.cpu.records import SuffixChainRecord

STATE_MASK = (1 << 32) - 1  # the low half of a packed match is its state; all supported processors are little-endian


class _MatchRecord(ctypes.Structure):
    """Longest suffix of a sequence that occurs in an automaton (fd_match)."""

    _fields_ = (("text", c_void_p), ("state", c_int32), ("length", c_int32))


class _RankedDraftRecord(ctypes.Structure):
    """Limits of a draft (fd_draft_spec)."""

    _fields_ = (
        ("discounts", c_void_p),
        ("end_ids", c_void_p),
        ("min_probability", c_double),
        *((name, c_int32) for name in "max_nodes max_depth width num_end_ids".split()),
    )


class NativeAutomaton:
    """Automaton of suffix.c, about 60 to 80 bytes per token. Raises MemoryError without memory."""

    def __init__(self) -> None:
        self._handle = load_handle()
        self.address: int = self._handle.fd_suffix_new() or 0
        if not self.address:
            raise MemoryError("no memory for a suffix automaton")
        weakref.finalize(self, self._handle.fd_suffix_free, self.address)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def num_bytes(self) -> int:
        return int(self._handle.fd_suffix_num_bytes(self.address))

    @property
    def num_operations(self) -> int:
        return int(self._handle.fd_suffix_num_operations(self.address))

    def extend(self, tokens: Sequence[int]) -> None:
        ids = array("i", tokens)
        if self._handle.fd_suffix_extend(self.address, ids.buffer_info()[0], len(ids)):
            raise MemoryError(f"no memory for a suffix automaton of more than {self._size} tokens")
        self._size += len(ids)

    def match_end(self) -> SuffixMatch:
        place = _MatchRecord()
        self._handle.fd_suffix_match_end(self.address, place)
        return SuffixMatch(self, place.state, place.length)

    @staticmethod
    def advance(matches: Sequence[SuffixMatch], tokens: Sequence[int]) -> list[SuffixMatch]:
        raw, ids = pack_matches(matches), array("i", tokens)
        load_handle().fd_suffix_advance(raw.buffer_info()[0], len(matches), ids.buffer_info()[0], len(ids))
        return [SuffixMatch(place[0], at & STATE_MASK, at >> 32) for place, at in zip(matches, raw[1::2], strict=True)]

    @staticmethod
    def predict(matches: Sequence[SuffixMatch], discount_table: "array[float]") -> Continuations:
        raw, tokens, chances = pack_matches(matches), (c_int32 * MAX_CONTINUATIONS)(), (c_double * MAX_CONTINUATIONS)()
        size = load_handle().fd_suffix_predict(
            raw.buffer_info()[0], len(matches), discount_table.buffer_info()[0], tokens, chances
        )
        return Continuations(tokens[:size], chances[:size])

    @staticmethod
    def draft(matches: Sequence[SuffixMatch], discount_table: "array[float]", spec: RankedDraftSpec) -> RankedDraft:
        raw, ends = pack_matches(matches), array("i", sorted(spec.end_ids))
        tokens, parents, chances = (
            (c_int32 * spec.max_nodes)(),
            (c_int32 * spec.max_nodes)(),
            (c_double * spec.max_nodes)(),
        )
        given = _RankedDraftRecord(
            discount_table.buffer_info()[0],
            ends.buffer_info()[0],
            spec.min_probability,
            spec.max_nodes,
            spec.max_depth,
            spec.width,
            len(ends),
        )
        size = load_handle().fd_suffix_draft(raw.buffer_info()[0], len(matches), given, tokens, parents, chances)
        if size < 0:
            raise MemoryError("no memory for a draft")
        return RankedDraft(tokens[:size], parents[:size], chances[:size])


def get_automaton_class() -> type[SuffixAutomaton]:
    """Return the native class, or the reference if the native library is missing or switched off."""
    return ReferenceAutomaton if load_library() is None else NativeAutomaton


@cache
def load_handle() -> ctypes.CDLL:
    """Return the native library with the types of its suffix functions declared."""
    library = load_library()
    assert library is not None, "the native automaton needs the native library"
    handle = library.handle
    handle.fd_suffix_new.restype = c_void_p
    handle.fd_suffix_free.argtypes = [c_void_p]
    handle.fd_suffix_free.restype = None
    handle.fd_suffix_extend.argtypes = [c_void_p, c_void_p, c_int64]
    for name in ("fd_suffix_num_bytes", "fd_suffix_num_operations"):
        getattr(handle, name).argtypes = [c_void_p]
        getattr(handle, name).restype = c_int64
    handle.fd_suffix_match_end.argtypes = [c_void_p, POINTER(_MatchRecord)]
    handle.fd_suffix_match_end.restype = None
    handle.fd_suffix_advance.argtypes = [c_void_p, c_int32, c_void_p, c_int64]
    handle.fd_suffix_advance.restype = None
    handle.fd_suffix_predict.argtypes = [c_void_p, c_int32, c_void_p, c_void_p, c_void_p]
    handle.fd_draft_suffix.argtypes = [POINTER(SuffixChainRecord)]
    handle.fd_suffix_draft.argtypes = [c_void_p, c_int32, POINTER(_RankedDraftRecord), c_void_p, c_void_p, c_void_p]
    return handle


def pack_matches(matches: Sequence[SuffixMatch]) -> "array[int]":
    """Pack matches as an array of fd_match: address, then length and state in the halves of one number.

    This takes a third of the time of ctypes structures.
    """
    return array("q", [n for text, state, length in matches for n in (text.address, state | length << 32)])  # type: ignore[attr-defined]
