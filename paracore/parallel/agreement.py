"""Do all ranks mean the same? One small message finds out before anybody waits for what never comes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from paracore.parallel.collectives import gather_list
from paracore.parallel.mesh import MeshAxis


def disagreement(
    what: str, facts: Mapping[str, object], error: str | None, axis: MeshAxis, device: torch.device
) -> str | None:
    """Return, alike on every rank, whose `facts` differ or who has an `error`; None if all is well.

    Every rank of `axis` must call it. facts: what must be the same, by name; compared by its repr. error:
    what this rank would raise by itself; the others would wait for it in vain. Where all agree this costs
    an all-gather of 8 bytes per rank.
    """
    mine = {name: repr(fact) for name, fact in facts.items()} | ({} if error is None else {"error": error})
    if axis.size == 1:
        everyone = [mine]
    else:
        digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=8).digest()
        number = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
        digests = torch.cat(gather_list(number, axis, [1] * axis.size, 0))
        if error is None and bool((digests == number).all()):
            return None
        everyone = [{} for _ in range(axis.size)]
        dist.all_gather_object(everyone, mine, group=axis.connection())
    return _differences(what, everyone)


def _differences(what: str, everyone: list[dict[str, str]]) -> str | None:
    errors = {rank: facts["error"] for rank, facts in enumerate(everyone) if "error" in facts}
    if errors:
        return "; ".join(f"{what}, rank {rank}: {error}" for rank, error in errors.items())
    for name in everyone[0]:
        if len({facts[name] for facts in everyone}) > 1:
            values = ", ".join(f"rank {rank}: {facts[name]}" for rank, facts in enumerate(everyone))
            return f"{what}: ranks disagree on {name}: {values}"
    return None
