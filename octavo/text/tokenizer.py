"""Text to token ids and back. One class for every kind of vocabulary; loading is in the files
beside this one (``directory``, ``gguf_vocabulary``)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Backend

from octavo.config import prepare_tokenizers
from octavo.text.pieces import PREFIX_SPACE
from octavo.text.vocabulary import PrefixSpace, Vocabulary, spelled_bytes
from octavo.types import InvalidRequest

# Of one text: more than any model takes. Listing their ids is one call, which takes 50 ms.
MOST_TOKENS = 5 << 18
# Added tokens that structure a conversation without being flagged special: <think>, [INST] …
_MARKER = re.compile(r"<.+>|\[.+\]|\{.+\}|\|.+\|", re.DOTALL)


def load_tokenizer(path: Path, override: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint directory or GGUF file, or the one ``override`` names: a
    directory, a file, or whatever else a model can be given as.

    Raises ConfigError in one line when there is none, or when it is of a kind not supported.
    """
    from octavo.text.directory import read_directory_vocabulary
    from octavo.text.gguf_vocabulary import read_gguf_vocabulary

    prepare_tokenizers()
    if override is not None:
        path = Path(override).expanduser()
        if not path.exists():
            from octavo.checkpoint.locate import locate

            path = locate(override, weights=False).path
    if path.is_file() and path.name in ("tokenizer.json", "tokenizer.model"):
        path = path.parent
    if path.is_dir():
        return Tokenizer(read_directory_vocabulary(path))
    return Tokenizer(read_gguf_vocabulary(path))


class ByteTable(dict[int, bytes]):
    """id -> bytes, filled as ids are met. Ids without a token (padding rows of a model's
    embedding) have no bytes."""

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._backend = vocabulary.backend
        self._spelling = vocabulary.spelling
        self._added = vocabulary.backend.get_added_tokens_decoder()
        self._skipped = skipped

    def __missing__(self, index: int) -> bytes:
        self[index] = found = self._spell(index)
        return found

    def _spell(self, index: int) -> bytes:
        if index in self._skipped:
            return b""
        if index in self._added:
            return self._added[index].content.encode()
        token = self._backend.id_to_token(index)
        return b"" if token is None else spelled_bytes(token, self._spelling)


class Tokenizer:
    """``bos_id``, ``eos_ids`` and ``special_ids`` are as the files declare them. ``vocab_size`` is
    one more than the highest id. ``encode`` and ``decode`` may be called from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._backend = vocabulary.backend
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_ids = vocabulary.special_ids
        self._added = vocabulary.backend.get_added_tokens_decoder()
        self._secret_key = secrets.token_hex(16)
        highest = max(self._added, default=-1)
        self.vocab_size = max(self._backend.get_vocab_size(with_added_tokens=True), highest + 1)
        self.bytes_of = ByteTable(vocabulary)
        self.text_bytes_of = ByteTable(vocabulary, vocabulary.special_ids)  # b"" for special ids
        self.control_ids = frozenset(
            index
            for index, token in self._added.items()
            if token.special or _MARKER.fullmatch(token.content)
        )

    @property
    def adds_bos(self) -> bool:
        return self.bos_id is not None and self.bos_id in self.vocabulary.prefix_ids

    def added_id(self, text: str) -> int | None:
        """The id of an added token (which text is never merged into), or None."""
        index = self._backend.token_to_id(text)
        return index if index in self._added else None

    @property
    def templates(self) -> dict[str, str]:
        """Chat templates of the checkpoint: name -> Jinja source."""
        return self.vocabulary.templates

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Ids of ``text``.

        ``add_special_tokens`` puts the vocabulary's BOS and EOS around it; a text that already
        begins with BOS gets no second one. ``allow_special=False`` reads control tokens in the
        text as plain characters. Raises InvalidRequest for text that is not valid Unicode.
        """
        if allow_special:
            ids = _encode(self._backend, self._with_spaces(text))
        else:
            ids = _encode(self._guarded, self._with_spaces(text, special=False))
        return self.surround(ids) if add_special_tokens else ids

    def surround(self, ids: list[int]) -> list[int]:
        """``ids`` with what the vocabulary puts before and after a text, BOS never twice."""
        prefix, suffix = self.vocabulary.prefix_ids, self.vocabulary.suffix_ids
        if ids[: len(prefix)] == prefix:
            prefix = []
        return [*prefix, *ids, *suffix]

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, in the vocabulary's own spelling."""
        return max(map(len, self._backend.get_vocab()))

    def token_bytes(self, index: int) -> bytes:
        """The token's own bytes; of a special or added token, its text's."""
        return self.bytes_of[index]

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """The id of each special token."""
        return {self._added[i].content: i for i in self.special_ids if i in self._added}

    def byte_table(self, size: int) -> list[bytes]:
        """``token_bytes`` of the ids 0 .. size - 1."""
        return list(map(ByteTable(self.vocabulary).__missing__, range(size)))

    def token_text(self, index: int) -> str:
        """The token by itself; bytes that are no whole character read as U+FFFD."""
        return self.bytes_of[index].decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence: the space that sentencepiece puts first is dropped."""
        table = self.text_bytes_of if skip_special_tokens else self.bytes_of
        data = b"".join(map(table.__getitem__, ids))
        if self.vocabulary.adds_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def bad_word_ids(self, words: Iterable[str]) -> list[list[int]]:
        """Each word as it is spelled at the beginning of a text and after a space."""
        spellings = [
            self.encode(text, add_special_tokens=False, allow_special=False)
            for word in words
            for text in (word, " " + word.lstrip())
        ]
        return [list(ids) for ids in dict.fromkeys(map(tuple, spellings)) if ids]

    def _with_spaces(self, text: str, special: bool = True) -> str:
        """``text`` with the prefix spaces of a sentencepiece vocabulary, told apart from spaces of
        the text. Not ``special``: special tokens do not count."""
        kind = self.vocabulary.prefix_space
        if kind is PrefixSpace.NONE or not text:
            return text
        pattern = self._special_pattern if special else None
        begins = pattern is None or pattern.match(text) is None
        if kind is PrefixSpace.EACH and pattern is not None:
            size = len(text)
            text = pattern.sub(lambda run: run[0] + PREFIX_SPACE * (run.end() < size), text)
        return PREFIX_SPACE + text if begins else text

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Finds runs of special tokens."""
        texts = [self._added[index].content for index in self.special_ids if index in self._added]
        if not texts:
            return None
        either = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        return re.compile(f"(?:{either})+")

    # ---- control tokens in text that users wrote (used by chat) ----

    @cached_property
    def control_pattern(self) -> re.Pattern[str] | None:
        """Finds control tokens in a text, the longest at each place."""
        texts = sorted((self._added[index].content for index in self.control_ids), key=len)
        return re.compile("|".join(map(re.escape, reversed(texts)))) if texts else None

    @cached_property
    def control_starts(self) -> frozenset[str]:
        """Every proper prefix of a control token."""
        texts = [self._added[index].content for index in self.control_ids]
        return frozenset(text[:end] for text in texts for end in range(1, len(text)))

    def structural(self, text: str) -> bool:
        """Whether control token ``text`` is one that is not flagged special."""
        index = self._backend.token_to_id(text)
        return index is not None and index not in self.special_ids

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        """Ids of ``text``, in which control tokens count; ``guard`` (a character that breaks
        them where they shall not) is removed before the text is cut into tokens."""
        assert self.control_pattern is not None
        ids = {self._added[index].content: index for index in self.control_ids}
        text = self._with_spaces(text)
        marked = self.control_pattern.sub(lambda found: self._secret(ids[found[0]]), text)
        return _encode(self._guarded, marked.replace(guard, ""))

    def _secret(self, index: int) -> str:
        return f"\ufdd0{self._secret_key}:{index}\ufdd1"

    @cached_property
    def _guarded(self) -> Backend:
        """The same tokenizer, but its control tokens are spelled as no text can spell them.
        Built when a text with control tokens first needs it."""
        content = json.loads(self._backend.to_str())
        renamed = {self._added[index].content: self._secret(index) for index in self.control_ids}
        for token in content["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
        vocab = content["model"]["vocab"]
        if isinstance(vocab, dict):
            renamed_vocab: object = {renamed.get(text, text): i for text, i in vocab.items()}
        else:  # Unigram: [piece, score] by id
            renamed_vocab = [[renamed.get(text, text), score] for text, score in vocab]
        content["model"]["vocab"] = renamed_vocab
        unknown = content["model"].get("unk_token")
        if unknown in renamed:
            content["model"]["unk_token"] = renamed[unknown]
        content["post_processor"] = None
        try:
            return Backend.from_str(json.dumps(content))
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequest(
                "the text spells a control token, which this tokenizer cannot cut into others "
                f"({error}); leave it out, or serve with --allow-special-tokens-in-content"
            ) from None


def _encode(backend: Backend, text: str) -> list[int]:
    """A batch of one, since only a batch leaves Python to other threads meanwhile: seconds, for a
    text of megabytes. Without offsets, in half the time."""
    try:
        encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
    except TypeError:
        raise InvalidRequest("the text holds half a surrogate pair, which is not Unicode") from None
    if len(encoding) > MOST_TOKENS:
        raise InvalidRequest(
            f"the text has {len(encoding)} tokens, at most {MOST_TOKENS} are read at once"
        )
    return encoding.ids
