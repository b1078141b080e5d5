"""Spec of an ensemble: the union of what its members need."""

from collections.abc import Callable, Sequence

from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.ensemble.selector import SelectionMode
from foredraft.drafters.ensemble.shared_kv import combine_draft_kv
from foredraft.drafters.spec import MISSED_STATES, SAME_VOCABULARY, DrafterSpec, MissedStates, combine_token_steps
from foredraft.models.hf import HFModel
from foredraft.path_features import PathFeatures


class SpecUnion:
    """Union of the members' specs, and the columns of `Commit.features` of each member.

    `max_nodes` changes in `update_max_nodes` alone, so that a quarantine that begins within a step changes it between
    two steps.

    Args:
        members: members of the ensemble.
        mode: selection mode, which decides how many nodes one draft may have.
        title: name of the ensemble.
    """

    def __init__(self, members: Sequence[EnsembleMember], mode: SelectionMode, title: str) -> None:
        self.members = members
        self.mode = mode
        self.title = title
        self._max_nodes = self._count_nodes()
        self._specs: list[DrafterSpec] = []  # of the members, as of the last read
        self._union = DrafterSpec(self._max_nodes)
        self._columns: list[list[int]] = []  # each member's columns among the layers of the union
        self.read()

    def read(self) -> DrafterSpec:
        """Return the union of the present specs; the same object while nothing changed."""
        specs = [member.sandboxed.spec for member in self.members]
        if specs != self._specs or self._union.max_nodes != self._max_nodes:
            self._specs, self._union = specs, self._combine(specs)
            layers = self._union.hidden_layers
            self._columns = [[layers.index(layer) for layer in spec.hidden_layers] for spec in specs]
        return self._union

    def update_max_nodes(self) -> None:
        """Count the nodes again; call it between two steps."""
        self._max_nodes = self._count_nodes()

    def select_features(self, index: int, features: PathFeatures) -> PathFeatures:
        """Return the features that a member's own `hidden_layers` request."""
        columns, num_layers = self._columns[index], len(self._union.hidden_layers)
        if not columns or columns == list(range(num_layers)):
            return features
        return features.select_layers(columns, num_layers)

    def _count_nodes(self) -> int:
        token_nodes = [member.max_nodes for member in self.members if member.is_token_only]
        model_nodes = [member.max_nodes for member in self.members if not member.is_token_only]
        if self.mode == "merge":
            return sum(token_nodes) + sum(model_nodes)
        return max(token_nodes, default=0) + max(model_nodes, default=0)

    def _combine(self, specs: Sequence[DrafterSpec]) -> DrafterSpec:
        return DrafterSpec(
            self._max_nodes,
            merge_layers([spec.hidden_layers for spec in specs]),
            needs_target_argmax=any(spec.needs_target_argmax for spec in specs),
            num_target_candidates=max((spec.num_target_candidates for spec in specs), default=0),
            draft_kv=combine_draft_kv([spec.draft_kv for spec in specs if spec.draft_kv is not None]),
            decides_length=self.mode != "merge",  # the ensemble itself compares the gain of every draft with its cost
            shares_target_kv=any(spec.shares_target_kv for spec in specs),
            attach=_combine_attach([spec.attach for spec in specs if spec.attach is not None]),
            # A plan drafts nothing for requests that miss states, and the token members of an ensemble still could.
            missed_states="forbidden" if self.mode == "merge" else _combine_missed_states(specs),
            token_steps=combine_token_steps(specs),
            title=self.title,
            silence_mismatch=_combine_silence([spec.silence_mismatch for spec in specs]),
            vocabulary=next((spec.vocabulary for spec in specs if spec.vocabulary != SAME_VOCABULARY), SAME_VOCABULARY),
            is_native=_combine_native([spec.is_native for spec in specs if spec.is_native is not None]),
            member_backoffs=tuple(backoff for member in self.members for backoff in member.backoffs),
        )


def _combine_attach(functions: Sequence[Callable[[HFModel], None]]) -> Callable[[HFModel], None] | None:
    """Return one function that attaches all members that draft in the target's own KV pool; None without any."""

    def attach(target: HFModel) -> None:
        for function in functions:
            function(target)

    return attach if functions else None


def _combine_silence(functions: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Return one function that turns off the mismatch warning of all members."""

    def silence() -> None:
        for function in functions:
            function()

    return silence


def _combine_native(flags: Sequence[bool]) -> bool | None:
    """Return whether all networks run as native code; None without a network."""
    return all(flags) if flags else None


def _combine_missed_states(specs: Sequence[DrafterSpec]) -> MissedStates:
    """Return the strictest of what missed hidden states do to a request, of the members that read them."""
    found = {spec.missed_states for spec in specs if spec.hidden_layers}
    return next((kind for kind in MISSED_STATES if kind in found), "forbidden")


def merge_layers(layer_sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return every layer once. The layers of the member with the most layers are adjacent."""
    return tuple(dict.fromkeys(layer for layers in sorted(layer_sets, key=len, reverse=True) for layer in layers))
