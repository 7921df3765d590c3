"""Sentencepiece vocabularies (pieces with scores), from either kind of file.

Sentencepiece's BPE joins, again and again, the neighbours whose joined piece has the highest
score. The same as merge rules: every way to cut a piece in two known pieces, best score first.
A unigram model is the tokenizers library's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.checkpoint.sentencepiece_model import PieceType
from octavo.types import ConfigError

# Stands for a prefix space until a text is normalized: a noncharacter, which no rule changes.
PREFIX_SPACE = "\U0010ffff"


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Tokens found in a text as a whole: control ones and the unknown one (special), and
    user-defined ones."""
    special = (PieceType.CONTROL, PieceType.UNKNOWN)
    return [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, types)
        if kind in (*special, PieceType.USER_DEFINED) and token
    ]


def index_tokens(tokens: Sequence[str], where: object) -> dict[str, int]:
    """Token -> id. Raises ConfigError when one token has two ids."""
    vocab = {token or f"[EMPTY_{index}]": index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        seen: dict[str, int] = {}
        for index, token in enumerate(tokens):
            if token and seen.setdefault(token, index) != index:
                raise ConfigError(
                    f"{where}: token {token!r} has two ids, {seen[token]} and {index}"
                )
    return vocab


def merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    normal = {token: index for token, index in vocab.items() if types[index] == PieceType.NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in normal.items():
        for cut in range(1, len(piece)):
            left = normal.get(piece[:cut])
            if left is not None:
                right = normal.get(piece[cut:])
                if right is not None:
                    found.append((-scores[index], left, right, piece[:cut], piece[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def sentencepiece_backend(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    add_space_prefix: bool,
    where: Path,
    charsmap: bytes = b"",
    collapse_spaces: bool = False,
    is_unigram: bool = False,
) -> Backend:
    """``charsmap`` is sentencepiece's compiled normalization; ``collapse_spaces`` makes runs of
    spaces one and strips the ends. The prefix space is put before every part of a text between
    added tokens, or (not ``add_space_prefix``) where the text has PREFIX_SPACE."""
    if is_unigram:
        backend = Backend(_unigram(tokens, scores, types, where))
        # A byte's piece stands for bytes that nothing else spells, never for its own spelling.
        spelled = Regex("(?<=<)0x(?=[0-9A-F]{2}>)")
        backend.pre_tokenizer = pre_tokenizers.Split(spelled, "isolated")
    else:
        backend = Backend(_bpe(tokens, scores, types, where))
    steps = _charsmap_steps(charsmap) if charsmap else []
    if collapse_spaces:
        ends = Regex(rf"\A +|(?<=\A{PREFIX_SPACE}) +| +\z")
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if add_space_prefix:
        steps.append(normalizers.Prepend("▁"))
    else:
        steps.append(normalizers.Replace(PREFIX_SPACE, "▁"))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_tokens(added_tokens(tokens, types))
    return backend


def _bpe(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], where: Path
) -> models.BPE:
    vocab = index_tokens(tokens, where)
    unknown = [token for token, kind in zip(tokens, types) if kind == PieceType.UNKNOWN]
    return models.BPE(
        vocab=vocab,
        merges=merges_from_scores(vocab, scores, types),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=PieceType.BYTE in types,
    )


def _unigram(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], where: Path
) -> models.Unigram:
    """The cut with the best sum of scores. What is not a normal piece must not lower the least
    score, by which the unknown is judged."""
    vocab = index_tokens(tokens, where)
    if PieceType.UNKNOWN not in types or PieceType.NORMAL not in types:
        raise ConfigError(f"{where}: a unigram model without an unknown piece, or without others")
    least = min(score for score, kind in zip(scores, types) if kind == PieceType.NORMAL)
    pieces = [
        (token, score if kind == PieceType.NORMAL else least)
        for token, score, kind in zip(vocab, scores, types)
    ]
    unknown = list(types).index(PieceType.UNKNOWN)
    return models.Unigram(pieces, unk_id=unknown, byte_fallback=PieceType.BYTE in types)


def _charsmap_steps(charsmap: bytes) -> list[normalizers.Normalizer]:
    """Sentencepiece maps character by character; the tokenizers library takes "\\r\\n" for one and
    would lose half of it where the rule maps "\\r"."""
    rule = normalizers.Precompiled(charsmap)
    if rule.normalize_str("\r") == "\r":
        return [rule]
    return [normalizers.Replace("\r\n", "\n\n"), rule]
