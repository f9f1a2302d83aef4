"""``--check``: which heads a program's author requires to be fused, and were not."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from .records import Report, Site


def failures(report: Report, patterns: Sequence[str]) -> list[str]:
    """A line for each required head that was kept, and for each pattern that no head matches.

    Args:
        report: the heads.
        patterns: globs on a head's module path (from any module on), on its ``file.py:line`` (from any directory on) or
            on its chain; none requires every head.
    """
    lines = []
    for pattern in patterns or ("*",):
        matched = [site for site in report.sites if _matches(site, pattern)]
        if not matched:
            lines.append(f"no head matches {pattern!r}" if patterns else "no head was seen")
        lines += (_line(site) for site in matched if site.status == "kept")
    return list(dict.fromkeys(lines))  # a head in several graphs, or under several patterns, fails once


def _matches(site: Site, pattern: str) -> bool:
    names = (site.module, site.where, site.pattern, site.chain)
    from_within = fnmatchcase(site.module, f"*.{pattern}") or fnmatchcase(site.where, f"*/{pattern}")
    return from_within or any(fnmatchcase(name, pattern) for name in names)


def _line(site: Site) -> str:
    head = f"{site.module} at {site.where}" if site.module else site.where
    why = f": {site.reason.sentence}" if site.reason is not None else ""
    return f"not fused: {head} ({site.chain or site.pattern}){why}"
