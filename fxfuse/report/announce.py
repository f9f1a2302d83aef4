"""Where else decisions are made known, as they are made: the log, Dynamo's counters, and the structured trace.

The log is the logger ``fxfuse`` of the standard library. ``TORCH_LOGS=fxfuse`` shows every decision, ``+fxfuse`` their
remedies, graphs without a head and repeated reads too: torch takes any importable name for a logger's. The counters
are ``torch._dynamo.utils.counters["fxfuse"]``. ``TORCH_TRACE`` gets an artifact ``fxfuse`` for each graph, which is the
JSON form of a report of that graph alone.
"""

from __future__ import annotations

import json
import logging
from collections import Counter

from .. import compat
from .records import GraphRecord, Kind, Report, Site

log = logging.getLogger("fxfuse")

_COUNTED: dict[Kind, str] = {"read": "dense reads", "copied": "copied weights", "at_once": "computed at once"}
_SAID: dict[Kind, str] = {
    "read": "deferred logits computed",
    "copied": "weight of unread logits copied",
    "at_once": "logits computed at once",
}


def graph(record: GraphRecord) -> None:
    """Make known what became of the heads of a graph, and of its attention."""
    counts = compat.counters()["fxfuse"]
    counts["graphs"] += 1
    if not record.sites:
        log.debug("graph %d: no head", record.id)
    for site in record.sites:
        counts[site.status] += 1
        log.info("graph %d: %s", record.id, _sentence(site))
        if site.reason is not None:
            counts[f"kept:{site.reason.code}"] += 1
            log.debug("graph %d: remedy: %s", record.id, site.reason.remedy)
    for where, count in Counter(record.unmasked).items():
        counts["attentions without a mask"] += count
        log.info("graph %d: attention without its mask at %s, %d calls", record.id, where, count)
    compat.trace_artifact("fxfuse", lambda: json.dumps(Report((record,)).to_dict()))


def read(kind: Kind, head: str, where: str, size: int, again: bool) -> None:
    """Make known that logits of the projection at ``head`` cost ``size`` bytes, ``again`` at the same place or not."""
    compat.counters()["fxfuse"][_COUNTED[kind]] += 1
    level = logging.DEBUG if again else logging.INFO  # a loop reads the same logits in every step
    log.log(level, "%s at %s, %d bytes: head at %s", _SAID[kind], where, size, head)


def _sentence(site: Site) -> str:
    """``"fused lm_head at train.py:42 (linear → cross_entropy, 8 x 4 → 99 float32): gradients in forward"``."""
    head = f"{site.status} {site.module} at" if site.module else f"{site.status} at"
    shape = f"{site.rows} x {site.hidden} → {site.vocab} {site.dtype}"
    why = site.variant
    if site.reason is not None:
        why = site.reason.sentence + (f" (at {site.reason.where})" if site.reason.where else "")
    return f"{head} {site.where} ({site.chain or site.pattern}, {shape})" + (f": {why}" if why else "")
