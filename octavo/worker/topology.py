"""Which ranks an engine has, where they run, and how they call each other. Never imports torch.

Ranks go stage by stage; those that share a layer are next to each other, and a node has as many as
the next, in order of node ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from octavo import __version__
from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo.parallel import Place

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Topology:
    """``address``: of the node of rank 0, as the others reach it."""

    tensor_size: int = 1
    pipeline_size: int = 1
    num_nodes: int = 1
    address: str = LOOPBACK

    @classmethod
    def of(cls, config: EngineConfig) -> Topology:
        parallel = config.parallel
        return cls(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.nnodes,
            parallel.master_addr if parallel.nnodes > 1 else LOOPBACK,
        )

    @property
    def size(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def reporter(self) -> int:
        """The rank whose results count: the first of the last stage."""
        return (self.pipeline_size - 1) * self.tensor_size

    @property
    def per_node(self) -> int:
        return self.size // self.num_nodes

    def ranks_of(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def place(self, rank: int, local: int) -> Place:
        from octavo.parallel import Place

        return Place(rank, self.tensor_size, self.pipeline_size, local, self.per_node)


# Settings of a node, not of the engine.
_OWN = {
    *("model.model", "model.tokenizer", "model.served_model_name"),
    *("parallel.cpu_threads", "parallel.node_rank", "parallel.cluster_secret_file"),
}


def facts_of(config: EngineConfig) -> dict[str, str]:
    """What has to be the same on every node: the version, and all settings but a node's own."""
    found = {"version": __version__}
    for room, values in msgspec.to_builtins(config).items():
        if not isinstance(values, dict):
            found[room] = repr(values)
            continue
        found |= {f"{room}.{name}": repr(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if name not in _OWN}


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """In words, the first few of them; "" where there is none."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(
        f"{name.rpartition('.')[2]} is {theirs.get(name)}, here {ours.get(name)}"
        for name in names[:3]
    )
