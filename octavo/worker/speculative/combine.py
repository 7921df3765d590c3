"""Which proposer a configuration asks for; and several as one."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.speculation import speculating
from octavo.worker.slots import Slots
from octavo.worker.speculative.ngram import NgramProposer
from octavo.worker.speculative.proposer import Proposer
from octavo.worker.speculative.suffix import SuffixProposer


def make_proposer(config: EngineConfig, slots: Slots) -> Proposer | None:
    """None without speculation."""
    wanted = speculating(config.speculative)
    if wanted is None:
        return None
    if wanted.methods[0] == "suffix":
        return SuffixProposer(slots, wanted.shortest, wanted.longest)
    return NgramProposer(slots, wanted.shortest, wanted.longest)
