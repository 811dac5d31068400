"""Language pairs: what models' names say of them, and the way from one language to another, through a third if needed.

A model whose name is SOURCE-TARGET, such as `en-de`, `eng_Latn-deu_Latn` or `en-pt_BR`, translates that pair. A code
is of two or three letters, and further parts after `_`. Upper and lower case are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..base.errors import ConfigError

CODE = "[a-zA-Z]{2,3}(?:_[a-zA-Z0-9]{2,8})*"
PAIR = re.compile(f"({CODE})-({CODE})", re.ASCII)
NAMES: dict[str, str] = dict(
    re.findall(
        "(..)=([A-Z][a-z]+)",
        "ar=Arabic bg=Bulgarian bn=Bengali ca=Catalan cs=Czech da=Danish de=German el=Greek en=English es=Spanish "
        "et=Estonian eu=Basque fa=Persian fi=Finnish fr=French ga=Irish gl=Galician he=Hebrew hi=Hindi hr=Croatian "
        "hu=Hungarian hy=Armenian id=Indonesian is=Icelandic it=Italian ja=Japanese ka=Georgian kk=Kazakh ko=Korean "
        "lt=Lithuanian lv=Latvian mk=Macedonian ms=Malay mt=Maltese nb=Norwegian nl=Dutch no=Norwegian pl=Polish "
        "pt=Portuguese ro=Romanian ru=Russian sk=Slovak sl=Slovenian sq=Albanian sr=Serbian sv=Swedish sw=Swahili "
        "ta=Tamil th=Thai tl=Tagalog tr=Turkish uk=Ukrainian ur=Urdu vi=Vietnamese zh=Chinese",
    )
)
"""English names of some languages, for clients that show them."""


class UnknownPair(ConfigError):
    """Languages that no model of the server, and no two, translate."""


def spellings(code: str) -> list[str]:
    """How a request's code may stand in a pair: as it is, else without its region or script."""
    full = code.strip().lower().replace("-", "_")
    return list(dict.fromkeys([full, full.split("_")[0]]))


def shown(code: str) -> str:
    """A language's English name, or its code where we have none."""
    base, _, region = code.partition("_")
    return f"{NAMES.get(base, base)} ({region.upper()})" if region else NAMES.get(base, base)


class Pairs:
    """The language pairs of models."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: of models; of two with the same pair, the first counts."""
        self._names: dict[tuple[str, str], str] = {}
        self._spelled: dict[str, str] = {}
        for name in names:
            if found := PAIR.fullmatch(name):
                source, target = found[1].lower(), found[2].lower()
                self._names.setdefault((source, target), name)
                for code in found.groups():
                    self._spelled.setdefault(code.lower(), code.replace("_", "-"))

    @property
    def sources(self) -> list[str]:
        """All source languages."""
        return sorted({source for source, _ in self._names})

    @property
    def codes(self) -> list[str]:
        """All languages, of sources and targets."""
        return sorted(self._spelled)

    def spelled(self, code: str) -> str:
        """A language as the model's name has it, with `-` before its region or script."""
        return self._spelled[code]

    def targets(self, source: str) -> list[str]:
        """The languages that a source language can be translated to, through a third one or not."""
        return sorted({target for _, target in self._names if self._way(source, target)})

    def only_source(self, target: str) -> str:
        """The source language of a target that has no other. Raises UnknownPair."""
        found = [source for source in self.sources if self._shortest([source], spellings(target))]
        if len(found) > 1:
            raise UnknownPair(
                f"texts for '{target:.40}' may be in {', '.join(found)}: say which language is the source"
            )
        if not found:
            raise self._unknown("any language", target)
        return found[0]

    def way(self, source: str, target: str) -> tuple[str, ...]:
        """The name of a pair's model, or of the two that lead there through a third language.

        A code with a region or script also finds the language without it: `en-US` finds `en`. An empty source is the
        only one that the target has. Raises UnknownPair.
        """
        sources = spellings(source) if source.strip() else [self.only_source(target)]
        if way := self._shortest(sources, spellings(target)):
            return way
        raise self._unknown(f"'{source:.40}'", target)

    def _shortest(self, sources: list[str], targets: list[str]) -> tuple[str, ...]:
        ways = (self._way(source, target) for source in sources for target in targets)
        return min(filter(None, ways), key=len, default=())

    def _way(self, source: str, target: str) -> tuple[str, ...]:
        if direct := self._names.get((source, target)):
            return (direct,)
        for start, middle in self._names if source != target else ():
            if start == source and (middle, target) in self._names:
                return self._names[start, middle], self._names[middle, target]
        return ()

    def _unknown(self, source: str, target: str) -> UnknownPair:
        pairs = ", ".join("-".join(pair) for pair in self._names) or "none: name models as in en-de=BUNDLE"
        return UnknownPair(f"no model from {source} to '{target:.40}': the server's pairs are {pairs:.400}")
